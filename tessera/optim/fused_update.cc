// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/fused_update.h>
#include <tessera/optim/parameter_part.h>
#include <tessera/optim/update_kernel.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace tessera {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

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

void run_plain(
    UpdateRule rule, const ParamOptions& options, const UpdateEntry& entry) {
  if (!entry.param.is_cpu()) {
    throw UsageError(fmt::format(
        "optimizer update: got parameters on {}, where RMSprop, Adagrad and "
        "Lion have no kernel; expected the CPU; take AdamW, Adam or SGD there",
        entry.param.device().str()));
  }
  const void* gradient = entry.gradient.const_data_ptr();
  UpdateRange range;
  range.parameter = entry.param.mutable_data_ptr();
  range.parameter_type = entry.param.scalar_type();
  range.gradients = {&gradient, 1};
  range.gradient_type = entry.gradient.scalar_type();
  range.numel = entry.param.numel();
  std::ranges::transform(
      entry.states, range.states.begin(), [](const at::Tensor& state) {
        return state.mutable_data_ptr();
      });
  const auto step = static_cast<int64_t>(entry.step.item<float>());
  run_update(rule, options, {.step = step}, range);
}

// The rules for which libtorch has no fused kernel. Of distributed tensors,
// the part is updated that the state belongs to.
void run_own(
    UpdateRule rule, const ParamOptions& options, const UpdateEntry& entry) {
  if (!is_dtensor(entry.param)) {
    return run_plain(rule, options, entry);
  }
  const SpecPtr spec = spec_of(entry.states.front());
  ParameterPart part(entry.param, spec);
  UpdateEntry local{
      part.local(),
      local_of(redistribute(entry.gradient, spec->placements)).contiguous(),
      {},
      local_of(entry.step)};
  std::ranges::transform(
      entry.states, std::back_inserter(local.states), local_of);
  run_plain(rule, options, local);
  part.start_return();
  part.finish_return();
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
    case UpdateRule::kRmsprop:
    case UpdateRule::kAdagrad:
    case UpdateRule::kLion:
      std::ranges::for_each(entries, [&](const UpdateEntry* entry) {
        run_own(rule, options, *entry);
      });
  }
}

} // namespace

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
