// SPDX-License-Identifier: Apache-2.0
//
// For tests: the local computations that stand in for an operator's own, on
// its arguments by schema position. `numbers` are the decision's, see
// LocalKernel.
#pragma once

#include <torch/torch.h>

#include <vector>

namespace tessera::simulation {

using Stack = std::vector<c10::IValue>;

// The sum over what a mean reduces, divided.
at::Tensor global_mean(const std::vector<int64_t>& numbers, const Stack& stack);

// The largest or the least value, of nothing: its identity. `dims`: the
// position of that argument, or -1.
at::Tensor extremum(bool largest, int64_t dims, const Stack& stack);

// What ranks add up (or take the extremum of) for the norms of one tensor or of
// a list, and what makes norms of it.
std::vector<at::Tensor> powers(int64_t p, const Stack& stack);
at::Tensor root(int64_t p, const Stack& stack, const at::Tensor& powers);

} // namespace tessera::simulation
