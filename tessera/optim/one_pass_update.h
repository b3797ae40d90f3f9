// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/optim/update_kernel.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

// Neighbouring elements of this rank's part of a flat buffer that are updated
// alike. Pointers as in UpdateRange.
struct ShardRun {
  int64_t begin = 0; // in the flat buffer
  int64_t numel = 0;
  const ParamOptions* options = nullptr; // until the call is done
  UpdateStep step;
  float* master = nullptr;
  std::array<void*, 3> states = {};
  std::optional<c10::ScalarType> state_type = std::nullopt;
  int64_t first_element = 0;
};

// A flat buffer's gradients reduced, its parameters updated, and the new ones
// written to all ranks, in one pass over memory: as reduce_scatter, run_update
// and all_gather, bit for bit. `gradients` and `parameters` have the same
// number of elements on every rank and can be lent (Group::can_lend); the runs
// of all ranks together are the elements to update, each in one of them.
// Gradients are left as they are. Collective over the group. Throws UsageError,
// TimeoutError, PeerError.
WorkPtr update_in_one_pass(
    const Group& group,
    UpdateRule rule,
    const at::Tensor& gradients,
    const at::Tensor& parameters,
    bool average,
    std::vector<ShardRun> runs);

} // namespace tessera
