// SPDX-License-Identifier: Apache-2.0
//
// One step, in the modes that reduce gradients themselves:
//   1. collect: the parameters that have a gradient, in the order of the
//   groups, each once. Every rank finds the same ones.
//   2. reduce: all gradients whose reduction is not there yet are started, then
//   waited for. Where a gradient goes decides where its state
//      lives, once and for all, at the parameter's first gradient.
//   3. update: the fused kernel runs on plain local tensors: this rank's part
//   of the parameter, of the gradient and of the states.
//   4. return: all parts are gathered into the parameters, started together,
//   then waited for.
// Clipping does 1 and 2, and scales what 2 made. In kImplicit there is no 2:
// the kernel is called on distributed tensors and the operator's rule decides
// what is communicated.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <tessera/comm/record.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/finite_check.h>
#include <tessera/optim/flat_state.h>
#include <tessera/optim/fused_update.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/gradient_placements.h>
#include <tessera/optim/implicit_clip.h>
#include <tessera/optim/local_cut.h>
#include <tessera/optim/parameter_part.h>
#include <tessera/optim/reduced_gradient.h>
#include <tessera/optim/step_mode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;

// What the optimizer keeps per parameter, beside torch's state.
struct Slot {
  at::Tensor parameter;
  SpecPtr state_spec = nullptr; // decided at the first gradient
  ReducedGradient gradient;
  int64_t steps = 0; // updates so far
  at::Tensor step_count; // float32 scalar, as the kernel takes it
};

// A parameter with a gradient in this step.
struct Job {
  const OptimizerParamGroup* group;
  Slot* slot;
};

// This rank's part of the reduced gradient, where the state lives.
at::Tensor gradient_part(const Slot& slot) {
  return cut_local(
      slot.gradient.local(), *slot.gradient.spec(), *slot.state_spec);
}

// Where the slot's state lives.
at::Tensor zero_state(const Slot& slot) {
  const SpecPtr spec = slot.state_spec;
  const auto& like = local_of(slot.parameter);
  return wrap_local(at::zeros(spec->local_sizes, like.options()), spec);
}

// Fills in what the kernel needs beside parameter and gradient, and counts the
// step. The state's tensors are distributed.
void add_state(
    UpdateEntry& entry,
    Slot& slot,
    UpdateRule rule,
    const ParamOptions& options,
    StateMap& states) {
  ++slot.steps;
  if (!needs_state(rule, options)) {
    return;
  }
  const auto zeros = [&] { return zero_state(slot); };
  auto& state = states[slot.parameter.unsafeGetTensorImpl()];
  entry.first = state == nullptr;
  if (entry.first) {
    state = make_state(rule, options, zeros);
  }
  entry.states = tensors_of(rule, *state);
  const auto count = static_cast<double>(advance(rule, *state));
  if (!slot.step_count.defined()) {
    const auto plain = at::TensorOptions()
                           .device(local_of(slot.parameter).device())
                           .dtype(c10::kFloat);
    slot.step_count = at::full({}, count, plain);
  }
  entry.step = slot.step_count.fill_(count);
}

// Jobs lie group after group, so the jobs of one call of `update` are
// neighbours that `same` accepts.
template <typename Same, typename Update>
void for_each_run(const std::vector<Job>& jobs, Same&& same, Update&& update) {
  for (size_t begin = 0; begin < jobs.size();) {
    size_t end = begin + 1;
    while (end < jobs.size() && same(jobs[begin], jobs[end])) {
      ++end;
    }
    update(std::span(jobs).subspan(begin, end - begin));
    begin = end;
  }
}

void update_parts(
    UpdateRule rule, const std::vector<Job>& jobs, StateMap& states) {
  std::vector<ParameterPart> parts;
  parts.reserve(jobs.size());
  const auto same_group = [](const Job& a, const Job& b) {
    return a.group == b.group;
  };
  for_each_run(jobs, same_group, [&](std::span<const Job> run) {
    const ParamOptions& options = run.front().group->options();
    std::vector<UpdateEntry> entries;
    for (const Job& job : run) {
      const ParameterPart& part =
          parts.emplace_back(job.slot->parameter, job.slot->state_spec);
      UpdateEntry entry{
          part.local(), gradient_part(*job.slot).contiguous(), {}, {}};
      add_state(entry, *job.slot, rule, options, states);
      std::ranges::transform(
          entry.states, entry.states.begin(), [](const at::Tensor& state) {
            return local_of(state);
          });
      if (part.local().numel() > 0) {
        entries.push_back(std::move(entry));
      }
    }
    run_fused_update(rule, options, entries);
  });
  std::ranges::for_each(parts, &ParameterPart::start_return);
  std::ranges::for_each(parts, &ParameterPart::finish_return);
}

// The kernel ignores strides, so a distributed tensor with a local one that is
// not contiguous is copied.
at::Tensor contiguous_dtensor(const at::Tensor& tensor) {
  return local_of(tensor).is_contiguous()
      ? tensor
      : tensor.clone(at::MemoryFormat::Contiguous);
}

void update_distributed(
    UpdateRule rule, const std::vector<Job>& jobs, StateMap& states) {
  const auto same_call = [](const Job& a, const Job& b) {
    return a.group == b.group &&
        spec_of(a.slot->parameter)->mesh == spec_of(b.slot->parameter)->mesh;
  };
  for_each_run(jobs, same_call, [&](std::span<const Job> run) {
    const ParamOptions& options = run.front().group->options();
    std::vector<UpdateEntry> entries;
    for (const Job& job : run) {
      const at::Tensor& param = job.slot->parameter;
      UpdateEntry entry{
          contiguous_dtensor(param), contiguous_dtensor(param.grad()), {}, {}};
      add_state(entry, *job.slot, rule, options, states);
      if (entry.step.defined()) {
        const DeviceMesh& mesh = job.slot->state_spec->mesh;
        entry.step = wrap_local(
            entry.step,
            intern_contiguous(mesh, replicated(mesh), {}, c10::kFloat));
      }
      entries.push_back(std::move(entry));
    }
    run_fused_update(rule, options, entries);
    for (size_t i = 0; i < run.size(); ++i) {
      at::Tensor param = run[i].slot->parameter;
      if (!entries[i].param.is_same(param)) {
        param.copy_(entries[i].param);
      }
      param.unsafeGetTensorImpl()->bump_version();
    }
  });
}

class TensorwiseMode : public StepMode {
 public:
  TensorwiseMode(
      UpdateRule rule, std::string axis, std::function<GradientSync()> sync)
      : rule_(rule), axis_(std::move(axis)), sync_(std::move(sync)) {}

  bool step(ParamGroups& groups, StateMap& states) override;
  ClipOutcome clip(ParamGroups& groups, const ClipRequest& request) override;
  void clip_value(
      ParamGroups& groups, double limit, std::optional<size_t> group) override;
  std::optional<ParameterState> state_of(
      const ParamGroups& groups,
      const StateMap& states,
      const at::Tensor& parameter) const override;
  void load_state(
      const at::Tensor& parameter,
      ParameterState state,
      ParamGroups& groups,
      StateMap& states) override;
  at::Tensor reduced_gradient(const at::Tensor& parameter) const override;
  OptimizerMemory memory(const StateMap& states) const override;

 private:
  // Of one group, or of all.
  std::vector<Job> collect(
      ParamGroups& groups, std::optional<size_t> only = std::nullopt);
  void reduce(const std::vector<Job>& jobs, GradientSync sync);
  SpecPtr state_spec(Slot& slot);
  void place_loaded(const std::vector<Job>& jobs, StateMap& states);

  UpdateRule rule_;
  std::string axis_;
  std::function<GradientSync()> sync_;
  std::unordered_map<c10::TensorImpl*, Slot> slots_;
  std::unordered_map<c10::TensorImpl*, ParameterState> loaded_; // not placed
};

// Every parameter with a gradient, once.
std::vector<Job> TensorwiseMode::collect(
    ParamGroups& groups, std::optional<size_t> only) {
  std::unordered_set<c10::TensorImpl*> seen;
  std::vector<Job> jobs;
  for (OptimizerParamGroup& group : groups) {
    if (only && &group != &groups[*only]) {
      continue;
    }
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined() ||
          !seen.insert(param.unsafeGetTensorImpl()).second) {
        continue;
      }
      require_distributed(param, "parameter");
      require_distributed(param.grad(), "gradient");
      Slot& slot = slots_[param.unsafeGetTensorImpl()];
      slot.parameter = param;
      jobs.push_back({&group, &slot});
    }
  }
  return jobs;
}

SpecPtr TensorwiseMode::state_spec(Slot& slot) {
  if (slot.state_spec == nullptr) {
    const TensorSpec& gradient = *spec_of(slot.parameter.grad());
    const Placements placements =
        shard_gradient(gradient, find_axis(gradient.mesh, axis_));
    slot.state_spec = intern_contiguous(
        gradient.mesh, placements, gradient.sizes, gradient.dtype);
  }
  return slot.state_spec;
}

void TensorwiseMode::reduce(const std::vector<Job>& jobs, GradientSync sync) {
  const AskerScope asker("optimizer.sync");
  std::vector<ReducedGradient*> in_flight;
  for (const Job& job : jobs) {
    Slot& slot = *job.slot;
    const at::Tensor& gradient = slot.parameter.grad();
    if (slot.gradient.is_of(gradient)) {
      continue;
    }
    SpecPtr target = state_spec(slot);
    if (sync == GradientSync::kAllReduce) {
      const SpecPtr whole =
          with_placements(target, all_reduce_gradient(*spec_of(gradient)));
      target = is_cut_of(*target, *whole) ? whole : target;
    }
    slot.gradient.start(gradient, target);
    in_flight.push_back(&slot.gradient);
  }
  for (ReducedGradient* gradient : in_flight) {
    gradient->wait();
  }
}

std::optional<ParameterState> TensorwiseMode::state_of(
    const ParamGroups& groups,
    const StateMap& states,
    const at::Tensor& parameter) const {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  if (const auto pending = loaded_.find(impl); pending != loaded_.end()) {
    return pending->second;
  }
  const auto slot = slots_.find(impl);
  if (slot == slots_.end() || slot->second.steps == 0) {
    return std::nullopt;
  }
  ParameterState result{slot->second.steps, {}};
  const auto state = states.find(impl);
  if (state == states.end()) { // the rule keeps none
    return result;
  }
  const auto fields =
      state_fields(rule_, group_of(groups, parameter)->options());
  const std::vector<at::Tensor> tensors = tensors_of(rule_, *state->second);
  for (size_t i = 0; i < fields.size(); ++i) {
    result.tensors[fields[i].name] = full_tensor(tensors[i]).clone();
  }
  return result;
}

void TensorwiseMode::load_state(
    const at::Tensor& parameter,
    ParameterState state,
    ParamGroups& groups,
    StateMap& states) {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  loaded_[impl] = std::move(state);
  if (const auto slot = slots_.find(impl); slot != slots_.end()) {
    place_loaded({{group_of(groups, parameter), &slot->second}}, states);
  }
}

// What was loaded goes to where its parameter's state lives, once that is
// known.
void TensorwiseMode::place_loaded(
    const std::vector<Job>& jobs, StateMap& states) {
  for (const Job& job : jobs) {
    Slot& slot = *job.slot;
    c10::TensorImpl* impl = slot.parameter.unsafeGetTensorImpl();
    const auto loaded = loaded_.find(impl);
    if (loaded == loaded_.end() || slot.state_spec == nullptr) {
      continue;
    }
    const auto& options = job.group->options();
    slot.steps = loaded->second.steps;
    if (needs_state(rule_, options) && slot.steps > 0) {
      auto& state = states[impl];
      state = make_state(rule_, options, [&] { return zero_state(slot); });
      set_steps(rule_, *state, slot.steps);
      const auto fields = state_fields(rule_, options);
      const std::vector<at::Tensor> tensors = tensors_of(rule_, *state);
      for (size_t i = 0; i < fields.size(); ++i) {
        const at::Tensor& local = local_of(tensors[i]);
        copy_share(
            {slot.state_spec, local, {0, local.numel()}},
            loaded->second.tensors.at(fields[i].name),
            local.as_strided({local.numel()}, {1}));
      }
    }
    loaded_.erase(loaded);
  }
}

bool TensorwiseMode::step(ParamGroups& groups, StateMap& states) {
  const GradientSync mode = sync_();
  const std::vector<Job> jobs = collect(groups);
  if (mode == GradientSync::kImplicit) {
    const AskerScope asker("optimizer.step");
    std::ranges::for_each(jobs, [&](const Job& job) { state_spec(*job.slot); });
    place_loaded(jobs, states);
    update_distributed(rule_, jobs, states);
    return true;
  }
  reduce(jobs, mode);
  place_loaded(jobs, states);
  const AskerScope asker("optimizer.step");
  update_parts(rule_, jobs, states);
  return true;
}

// Which of the gradients have an element that is infinite or NaN on some rank:
// alike on all. One all_reduce, on the way to an error only.
std::vector<at::Tensor> nonfinite_of(
    const World& world, const std::vector<Job>& jobs, bool is_reduced) {
  std::vector<double> bad;
  bad.reserve(jobs.size());
  for (const Job& job : jobs) {
    const at::Tensor part = is_reduced ? gradient_part(*job.slot)
                                       : local_of(job.slot->parameter.grad());
    bad.push_back(all_finite(part.contiguous().flatten()) ? 0 : 1);
  }
  all_reduce_values(world, bad, ReduceOp::kMax);
  std::vector<at::Tensor> nonfinite;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (bad[i] > 0) {
      nonfinite.push_back(jobs[i].slot->parameter);
    }
  }
  return nonfinite;
}

// As torch's own: the norm of the Partial gradients, each operator reducing
// what it reads.
ClipOutcome clip_implicit(
    const World& world,
    const std::vector<Job>& jobs,
    const ClipRequest& request) {
  std::vector<at::Tensor> params;
  std::ranges::transform(jobs, std::back_inserter(params), [](const Job& job) {
    return job.slot->parameter;
  });
  if (request.options.error_if_nonfinite) {
    const double norm =
        norm_of_partial_gradients(world, params, request.norm_type);
    if (!std::isfinite(norm)) {
      return {norm, true, nonfinite_of(world, jobs, /*is_reduced=*/false)};
    }
  }
  return {clip_partial_gradients(
      world, params, request.max_norm, request.norm_type)};
}

ClipOutcome TensorwiseMode::clip(
    ParamGroups& groups, const ClipRequest& request) {
  const GradientSync mode = sync_();
  const std::vector<Job> jobs = collect(groups, request.options.group);
  const World world = world_of(groups);
  if (mode == GradientSync::kImplicit) {
    const AskerScope asker("optimizer.clip");
    return clip_implicit(world, jobs, request);
  }
  reduce(jobs, mode);
  const AskerScope asker("optimizer.clip");
  std::vector<NormPart> parts;
  parts.reserve(jobs.size());
  for (const Job& job : jobs) {
    parts.push_back({gradient_part(*job.slot), job.slot->state_spec});
  }
  const double norm = global_norm(world, parts, request.norm_type);
  if (request.options.error_if_nonfinite && !std::isfinite(norm)) {
    return {norm, true, nonfinite_of(world, jobs, /*is_reduced=*/true)};
  }
  const double coefficient = clip_coefficient(request.max_norm, norm);
  if (coefficient != 1) {
    std::ranges::for_each(
        jobs, [&](const Job& job) { job.slot->gradient.scale(coefficient); });
  }
  return {norm};
}

void TensorwiseMode::clip_value(
    ParamGroups& groups, double limit, std::optional<size_t> group) {
  const GradientSync mode = sync_();
  const std::vector<Job> jobs = collect(groups, group);
  if (mode != GradientSync::kImplicit) {
    reduce(jobs, mode);
  }
  const AskerScope asker("optimizer.clip");
  for (const Job& job : jobs) {
    if (mode == GradientSync::kImplicit) {
      job.slot->parameter.mutable_grad().clamp_(-limit, limit);
    } else {
      job.slot->gradient.cut(limit);
    }
  }
}

at::Tensor TensorwiseMode::reduced_gradient(const at::Tensor& parameter) const {
  const auto found = slots_.find(parameter.unsafeGetTensorImpl());
  if (found == slots_.end() || !parameter.grad().defined() ||
      !found->second.gradient.is_of(parameter.grad())) {
    return {};
  }
  const ReducedGradient& gradient = found->second.gradient;
  return wrap_local(gradient.local(), gradient.spec());
}

OptimizerMemory TensorwiseMode::memory(const StateMap& states) const {
  OptimizerMemory memory;
  for (const auto& [param, state] : states) {
    for (const at::Tensor& tensor : tensors_of(rule_, *state)) {
      memory.state_bytes += static_cast<int64_t>(local_of(tensor).nbytes());
    }
  }
  for (const auto& [param, slot] : slots_) {
    memory.gradient_bytes += slot.gradient.buffer_bytes();
    memory.state_bytes += slot.step_count.defined()
        ? static_cast<int64_t>(slot.step_count.nbytes())
        : 0;
  }
  return memory;
}

} // namespace

std::unique_ptr<StepMode> make_tensorwise_mode(
    UpdateRule rule, std::string axis, std::function<GradientSync()> sync) {
  return std::make_unique<TensorwiseMode>(
      rule, std::move(axis), std::move(sync));
}

} // namespace tessera
