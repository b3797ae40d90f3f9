// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera {

// The element-wise updates that are built.
enum class UpdateRule : uint8_t {
  kAdamW,
  kAdam,
  kSgd,
  kRmsprop,
  kAdagrad,
  kLion
};

// Throws UsageError that names what is built.
UpdateRule update_rule_of(const torch::optim::Optimizer& optimizer);

// Whether any parameter has been updated. (Adagrad has states before that.)
bool has_stepped(const torch::optim::Optimizer& optimizer);

// The states of one parameter, in torch's own types.
using ParamState = torch::optim::OptimizerParamState;
using ParamOptions = torch::optim::OptimizerOptions;

// A tensor of the parameter's size that the rule keeps.
struct StateField {
  const char* name; // as torch calls it: "exp_avg", "momentum_buffer"
  double initial; // what it starts as
};

// Which states the rule keeps under these options, in the order of tensors_of
// and of UpdateRange::states: at most three. None for SGD without momentum.
std::vector<StateField> state_fields(
    UpdateRule rule, const ParamOptions& options);

inline bool needs_state(UpdateRule rule, const ParamOptions& options) {
  return !state_fields(rule, options).empty();
}

// A fresh state whose tensors come from `zeros`.
std::unique_ptr<ParamState> make_state(
    UpdateRule rule,
    const ParamOptions& options,
    const std::function<at::Tensor()>& zeros);

// The state's tensors, in the order of state_fields.
std::vector<at::Tensor> tensors_of(UpdateRule rule, ParamState& state);

// Counts one more step and returns how many there are. 0 for SGD and Lion,
// which do not count.
int64_t advance(UpdateRule rule, ParamState& state);
// Sets that count, where the rule has one.
void set_steps(UpdateRule rule, ParamState& state, int64_t steps);

} // namespace tessera
