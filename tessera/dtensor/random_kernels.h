// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <tessera/dtensor/local_kernels.h>

#include <string>

namespace tessera {

// LocalKernel::kRandom: random operators on this rank's part, with the numbers
// that the whole tensor would get.
void run_random(const LocalCall& call, torch::jit::Stack& stack);

// A random operator without a rule, on replicated inputs: runs with a generator
// seeded from the world's stream, so that all ranks draw alike.
void run_seeded(const LocalCall& call, torch::jit::Stack& stack);

// Whether run_random knows the operator.
bool has_random_kernel(const std::string& op);

} // namespace tessera
