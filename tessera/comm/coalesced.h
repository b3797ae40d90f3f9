// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>

#include <vector>

namespace tessera {

// Reduces many tensors of one dtype in one all_reduce: for small ones, whose
// calls would cost more than their bytes. They need not be contiguous, and get
// their results in wait(), which must be called. Collective over the group, as
// Group::all_reduce; the tensors and their order are the same on all ranks.
// Throws UsageError where dtypes differ or the list is empty.
WorkPtr all_reduce_coalesced(
    const Group& group, std::vector<at::Tensor> tensors, ReduceOp op);

} // namespace tessera
