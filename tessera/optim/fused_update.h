// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

// The element-wise updates that are built, each with a fused kernel in
// libtorch.
enum class UpdateRule : uint8_t { kAdamW, kAdam, kSgd };

// Throws UsageError that names what is built.
UpdateRule update_rule_of(const torch::optim::Optimizer& optimizer);

// The states of one parameter, in torch's own types.
using ParamState = torch::optim::OptimizerParamState;
using ParamOptions = torch::optim::OptimizerOptions;

// Whether the rule needs a state under these options (SGD without momentum does
// not).
bool needs_state(UpdateRule rule, const ParamOptions& options);

// A fresh state whose tensors come from `zeros`.
std::unique_ptr<ParamState> make_state(
    UpdateRule rule,
    const ParamOptions& options,
    const std::function<at::Tensor()>& zeros);

// The state's tensors: first and second moment and (amsgrad) its maximum, or
// the momentum buffer.
std::vector<at::Tensor> tensors_of(UpdateRule rule, const ParamState& state);

// Counts one more step and returns how many there are. 0 for SGD, which does
// not count.
int64_t advance(UpdateRule rule, ParamState& state);

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
