// SPDX-License-Identifier: Apache-2.0
//
// For tests: the local computations that stand in for an operator's own, on
// its arguments by schema position.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace tessera::simulation {

using Stack = std::vector<c10::IValue>;

// The sum over what a mean reduces, divided.
at::Tensor global_mean(const Stack& stack, int64_t count);

// amax, amin, max, min; of nothing: their identity.
at::Tensor extremum(const std::string& op, const Stack& stack);

// What ranks add up (or take the extremum of) for the norms of one tensor or of
// a list, and what makes norms of it.
std::vector<at::Tensor> powers(const std::string& op, const Stack& stack);
at::Tensor root(const Stack& stack, const at::Tensor& powers);

} // namespace tessera::simulation
