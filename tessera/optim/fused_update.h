// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/optim/update_rule.h>

#include <vector>

namespace tessera {

// What one call of the fused kernel works on. All tensors of one entry have the
// same shape and placement. The kernel walks memory without regard to strides,
// so everything is contiguous.
struct UpdateEntry {
  at::Tensor param;
  at::Tensor gradient;
  std::vector<at::Tensor> states;
  at::Tensor step; // float32 scalar, empty for SGD
  bool first = false; // the state is fresh
};

// Runs the update in place on params and states: one kernel call per dtype (and
// one more for fresh SGD states). Entries are either all plain or all
// distributed over one mesh; of those the dispatcher redistributes what the
// operator's rule wants.
void run_fused_update(
    UpdateRule rule,
    const ParamOptions& options,
    const std::vector<UpdateEntry>& entries);

} // namespace tessera
