// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/fused_update.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <tuple>
#include <typeinfo>
#include <utility>

namespace tessera {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamParamState;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

// The entries of one kernel call, as the lists that the kernel takes.
struct Lists {
  explicit Lists(const std::vector<const UpdateEntry*>& entries) {
    states.resize(entries.empty() ? 0 : entries.front()->states.size());
    for (const UpdateEntry* entry : entries) {
      params.push_back(entry->param);
      gradients.push_back(entry->gradient);
      steps.push_back(entry->step);
      for (size_t i = 0; i < states.size(); ++i) {
        states[i].push_back(entry->states[i]);
      }
    }
  }
  at::TensorList state(size_t index) const {
    return index < states.size() ? at::TensorList(states[index])
                                 : at::TensorList();
  }

  std::vector<at::Tensor> params;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> steps;
  std::vector<std::vector<at::Tensor>> states;
};

template <typename Options, typename Kernel>
void run_adam(const Options& options, const Lists& lists, Kernel&& kernel) {
  const auto [beta1, beta2] = options.betas();
  kernel(
      lists.params,
      lists.gradients,
      lists.state(0),
      lists.state(1),
      lists.state(2),
      lists.steps,
      options.lr(),
      beta1,
      beta2,
      options.weight_decay(),
      options.eps(),
      options.amsgrad(),
      /*maximize=*/false);
}

void run_sgd(const SGDOptions& options, const Lists& lists, bool first) {
  at::_fused_sgd_(
      lists.params,
      lists.gradients,
      lists.state(0),
      options.weight_decay(),
      options.momentum(),
      options.lr(),
      options.dampening(),
      options.nesterov(),
      /*maximize=*/false,
      first);
}

void run_call(
    UpdateRule rule,
    const ParamOptions& options,
    const std::vector<const UpdateEntry*>& entries) {
  const Lists lists(entries);
  switch (rule) {
    case UpdateRule::kAdamW:
      run_adam(
          static_cast<const AdamWOptions&>(options), lists, [](auto&&... args) {
            at::_fused_adamw_(args...);
          });
      break;
    case UpdateRule::kAdam:
      run_adam(
          static_cast<const AdamOptions&>(options), lists, [](auto&&... args) {
            at::_fused_adam_(args...);
          });
      break;
    case UpdateRule::kSgd:
      run_sgd(
          static_cast<const SGDOptions&>(options),
          lists,
          entries.front()->first);
      break;
  }
}

template <typename State>
std::unique_ptr<ParamState> make_moments(
    bool amsgrad, const std::function<at::Tensor()>& zeros) {
  auto state = std::make_unique<State>();
  state->exp_avg(zeros());
  state->exp_avg_sq(zeros());
  if (amsgrad) {
    state->max_exp_avg_sq(zeros());
  }
  return state;
}

template <typename State>
std::vector<at::Tensor> moments(const ParamState& state) {
  const auto& typed = static_cast<const State&>(state);
  std::vector<at::Tensor> tensors{typed.exp_avg(), typed.exp_avg_sq()};
  if (typed.max_exp_avg_sq().defined()) {
    tensors.push_back(typed.max_exp_avg_sq());
  }
  return tensors;
}

template <typename State>
int64_t count_step(ParamState& state) {
  return ++static_cast<State&>(state).step();
}

} // namespace

UpdateRule update_rule_of(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr) {
    return UpdateRule::kAdamW;
  }
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr) {
    return UpdateRule::kAdam;
  }
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr) {
    return UpdateRule::kSgd;
  }
  throw UsageError(fmt::format(
      "shard_optimizer: got {}, whose update is not sharded yet; expected "
      "torch::optim::AdamW, Adam or SGD; take one of those, or step this one "
      "as it is, with its whole state on every rank",
      c10::demangle(typeid(optimizer).name())));
}

bool needs_state(UpdateRule rule, const ParamOptions& options) {
  return rule != UpdateRule::kSgd ||
      static_cast<const SGDOptions&>(options).momentum() != 0;
}

std::unique_ptr<ParamState> make_state(
    UpdateRule rule,
    const ParamOptions& options,
    const std::function<at::Tensor()>& zeros) {
  switch (rule) {
    case UpdateRule::kAdamW:
      return make_moments<AdamWParamState>(
          static_cast<const AdamWOptions&>(options).amsgrad(), zeros);
    case UpdateRule::kAdam:
      return make_moments<AdamParamState>(
          static_cast<const AdamOptions&>(options).amsgrad(), zeros);
    case UpdateRule::kSgd:
      break;
  }
  auto state = std::make_unique<SGDParamState>();
  state->momentum_buffer(zeros());
  return state;
}

std::vector<at::Tensor> tensors_of(UpdateRule rule, const ParamState& state) {
  switch (rule) {
    case UpdateRule::kAdamW:
      return moments<AdamWParamState>(state);
    case UpdateRule::kAdam:
      return moments<AdamParamState>(state);
    case UpdateRule::kSgd:
      break;
  }
  return {static_cast<const SGDParamState&>(state).momentum_buffer()};
}

int64_t advance(UpdateRule rule, ParamState& state) {
  switch (rule) {
    case UpdateRule::kAdamW:
      return count_step<AdamWParamState>(state);
    case UpdateRule::kAdam:
      return count_step<AdamParamState>(state);
    case UpdateRule::kSgd:
      break;
  }
  return 0;
}

void run_fused_update(
    UpdateRule rule,
    const ParamOptions& options,
    const std::vector<UpdateEntry>& entries) {
  using Key = std::tuple<c10::ScalarType, bool, size_t>;
  std::vector<std::pair<Key, std::vector<const UpdateEntry*>>>
      calls; // in order of appearance, alike on all ranks
  for (const UpdateEntry& entry : entries) {
    const Key key{
        entry.param.scalar_type(),
        rule == UpdateRule::kSgd && entry.first,
        entry.states.size()};
    auto call =
        std::ranges::find(calls, key, [](const auto& c) { return c.first; });
    if (call == calls.end()) {
      call = calls.insert(calls.end(), {key, {}});
    }
    call->second.push_back(&entry);
  }
  for (const auto& [key, call] : calls) {
    run_call(rule, options, call);
  }
}

} // namespace tessera
