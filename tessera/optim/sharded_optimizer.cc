// SPDX-License-Identifier: Apache-2.0
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/step_mode.h>
#include <tessera/optim/sync_choice.h>
#include <tessera/optim/update_rule.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
// Takes over groups and options; of a parameter that appears twice in a group,
// the first stays.
ParamGroups distinct_groups(const ParamGroups& groups) {
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  ParamGroups result;
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<at::Tensor> params;
    for (const at::Tensor& param : groups[g].params()) {
      const auto [entry, is_new] = seen.emplace(param.unsafeGetTensorImpl(), g);
      if (is_new) {
        params.push_back(param);
      } else if (entry->second != g) {
        throw UsageError(fmt::format(
            "shard_optimizer: a parameter is in groups {} and {}, expected in "
            "one; take it out of the other",
            entry->second,
            g));
      }
    }
    result.emplace_back(std::move(params), groups[g].options().clone());
  }
  return result;
}

void require_group(const ParamGroups& groups, std::optional<size_t> group) {
  if (group && *group >= groups.size()) {
    throw UsageError(fmt::format(
        "clip_grad: got group {}, expected one of the {} in param_groups()",
        *group,
        groups.size()));
  }
}

// Every parameter is distributed, and at least one mesh has the axis.
void require_axis(const ParamGroups& groups, const std::string& name) {
  const DeviceMesh* without = nullptr;
  bool found = false;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      require_distributed(param, "parameter");
      const DeviceMesh& mesh = spec_of(param)->mesh;
      found = found || find_axis(mesh, name) >= 0;
      without = &mesh;
    }
  }
  if (!found && without != nullptr) {
    without->axis_index(name); // throws and lists the axes
  }
}

} // namespace

struct ShardedOptimizer::Impl {
  UpdateRule rule;
  ShardingStage stage;
  ShardOptions options;
  std::unique_ptr<StepMode> mode;
  bool is_bucketed = false;
  bool has_stepped = false;
  std::unordered_map<c10::TensorImpl*, std::string> names = {}; // of parameters

  GradientSync sync() const {
    return options.sync == GradientSync::kDefault ? sync_from_environment()
                                                  : options.sync;
  }
  void make_mode(const ParamGroups& groups);
  StepMode& mode_for_step(const ParamGroups& groups);
  std::string name_of(
      const ParamGroups& groups, const at::Tensor& parameter) const;
  [[noreturn]] void refuse(
      const ParamGroups& groups, const ClipOutcome& outcome) const;
};

void ShardedOptimizer::Impl::make_mode(const ParamGroups& groups) {
  is_bucketed = sync() == GradientSync::kBucketed;
  if (stage.stage > 1 && !is_bucketed) {
    throw UsageError(
        "shard_optimizer: got ShardingStage2 in a mode without flat buffers, "
        "expected kBucketed; choose that, or ShardingStage1");
  }
  if (!is_bucketed &&
      (options.reduce_dtype ||
       options.narrow_update == NarrowUpdate::kStochasticRounding)) {
    throw UsageError(
        "shard_optimizer: got reduce_dtype or kStochasticRounding in a mode "
        "without flat buffers, expected kBucketed; choose that");
  }
  mode = is_bucketed
      ? make_bucketed_mode(rule, stage, options, groups)
      : make_tensorwise_mode(rule, stage.axis, [this] { return sync(); });
}

// The environment may have changed since the last step. Flat states cannot
// become states per tensor.
StepMode& ShardedOptimizer::Impl::mode_for_step(const ParamGroups& groups) {
  if ((sync() == GradientSync::kBucketed) != is_bucketed) {
    if (has_stepped) {
      throw UsageError(
          "optimizer step [environment]: got a change between flat buffers and "
          "FLAGS_fuse_allreduce_in_opt or FLAGS_fuse_reducescatter_in_opt "
          "after the first step, expected none; set them before training");
    }
    make_mode(groups);
  }
  has_stepped = true;
  return *mode;
}

ShardedOptimizer::ShardedOptimizer(
    torch::optim::Optimizer&& optimizer,
    ShardingStage stage,
    const ShardOptions& options)
    : Optimizer(ParamGroups(), optimizer.defaults().clone()),
      impl_(std::make_unique<Impl>(Impl{
          update_rule_of(optimizer), std::move(stage), options, nullptr})) {
  if (has_stepped(optimizer)) {
    throw UsageError(
        "shard_optimizer: got an optimizer that has stepped, expected a fresh "
        "one; shard it before training");
  }
  param_groups_ = distinct_groups(optimizer.param_groups());
  require_axis(param_groups_, impl_->stage.axis);
  impl_->make_mode(param_groups_);
}

ShardedOptimizer::~ShardedOptimizer() = default;
ShardedOptimizer::ShardedOptimizer(ShardedOptimizer&&) noexcept = default;
ShardedOptimizer& ShardedOptimizer::operator=(ShardedOptimizer&&) noexcept =
    default;

// What an error calls a parameter.
std::string ShardedOptimizer::Impl::name_of(
    const ParamGroups& groups, const at::Tensor& parameter) const {
  const auto name = names.find(parameter.unsafeGetTensorImpl());
  if (name != names.end()) {
    return name->second;
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& params = groups[g].params();
    const auto found = std::ranges::find_if(
        params, [&](const at::Tensor& p) { return p.is_same(parameter); });
    if (found != params.end()) {
      return fmt::format("parameter {} of group {}", found - params.begin(), g);
    }
  }
  return spec_of(parameter)->str();
}

void ShardedOptimizer::Impl::refuse(
    const ParamGroups& groups, const ClipOutcome& outcome) const {
  std::vector<std::string> culprits;
  culprits.reserve(outcome.nonfinite.size());
  for (const at::Tensor& parameter : outcome.nonfinite) {
    culprits.push_back(name_of(groups, parameter));
  }
  throw UsageError(fmt::format(
      "clip_grad_norm: got the norm {}, expected a finite one; {}",
      outcome.norm,
      culprits.empty()
          ? std::string(
                "all elements are finite, so their powers are too large to add "
                "up; take a smaller learning rate or norm_type infinity")
          : fmt::format(
                "infinite or NaN: the gradients of {}; look at what these "
                "compute, or skip such steps with GradScaler",
                fmt::join(culprits, ", "))));
}

torch::Tensor ShardedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enabled(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  impl_->mode_for_step(param_groups_).step(param_groups_, state_);
  return loss;
}

void ShardedOptimizer::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none || impl_->stage.stage > 1);
}

bool ShardedOptimizer::step_if_finite() {
  const c10::NoGradGuard no_grad;
  return impl_->mode_for_step(param_groups_).step(param_groups_, state_);
}

void ShardedOptimizer::unscale(double scale) {
  impl_->mode_for_step(param_groups_).unscale(scale);
}

void ShardedOptimizer::name_parameters(const torch::nn::Module& module) {
  for (const auto& entry : module.named_parameters()) {
    impl_->names[entry.value().unsafeGetTensorImpl()] = entry.key();
  }
}

double ShardedOptimizer::clip_grad_norm(
    double max_norm, double norm_type, const ClipOptions& options) {
  if (!(norm_type > 0)) {
    throw UsageError(fmt::format(
        "clip_grad_norm: got norm_type {}, expected a positive number or "
        "infinity",
        norm_type));
  }
  require_group(param_groups_, options.group);
  const c10::NoGradGuard no_grad;
  if (!world_of(param_groups_)) {
    return 0;
  }
  const ClipOutcome outcome =
      impl_->mode_for_step(param_groups_)
          .clip(param_groups_, {max_norm, norm_type, options});
  if (outcome.is_refused) {
    impl_->refuse(param_groups_, outcome);
  }
  return outcome.norm;
}

void ShardedOptimizer::clip_grad_value(
    double limit, std::optional<size_t> group) {
  if (!(limit >= 0)) {
    throw UsageError(fmt::format(
        "clip_grad_value: got the limit {}, expected one from 0 on", limit));
  }
  require_group(param_groups_, group);
  const c10::NoGradGuard no_grad;
  if (world_of(param_groups_)) {
    impl_->mode_for_step(param_groups_).clip_value(param_groups_, limit, group);
  }
}

at::Tensor ShardedOptimizer::reduced_gradient(
    const at::Tensor& parameter) const {
  return impl_->mode->reduced_gradient(parameter);
}

FlatShard ShardedOptimizer::reduced_shard(const at::Tensor& parameter) const {
  return impl_->mode->reduced_shard(parameter);
}

AccumulationScope ShardedOptimizer::accumulate() {
  return impl_->mode->accumulate();
}

BucketStatistics ShardedOptimizer::bucket_statistics() const {
  return impl_->mode->bucket_statistics();
}

GradientSync ShardedOptimizer::sync() const {
  return impl_->sync();
}

OptimizerMemory ShardedOptimizer::memory() const {
  return impl_->mode->memory(state_);
}

OptimizerState ShardedOptimizer::state_dict(
    const torch::nn::Module& module) const {
  const c10::NoGradGuard no_grad;
  std::unordered_map<c10::TensorImpl*, std::string> names;
  for (const auto& entry : module.named_parameters()) {
    names.emplace(entry.value().unsafeGetTensorImpl(), entry.key());
  }
  OptimizerState result;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const auto name = names.find(param.unsafeGetTensorImpl());
      if (name == names.end()) {
        throw UsageError(fmt::format(
            "state_dict: got a module without the optimizer's parameter {}, "
            "expected the one that it trains; pass that",
            spec_of(param)->str()));
      }
      if (auto state = impl_->mode->state_of(param_groups_, state_, param)) {
        result.emplace(name->second, std::move(*state));
      }
    }
  }
  return result;
}

void ShardedOptimizer::load_state_dict(
    const torch::nn::Module& module, const OptimizerState& state) {
  const c10::NoGradGuard no_grad;
  const auto parameters = module.named_parameters();
  for (const auto& [name, entry] : state) {
    const at::Tensor* param = parameters.find(name);
    const auto* group =
        param == nullptr ? nullptr : group_of(param_groups_, *param);
    if (group == nullptr) {
      throw UsageError(fmt::format(
          "load_state_dict: got the state of {}, expected parameters of the "
          "module and the optimizer; load the state of the same model",
          name));
    }
    require_fitting_state(impl_->rule, group->options(), *param, entry);
  }
  for (const auto& [name, entry] : state) {
    impl_->mode_for_step(param_groups_)
        .load_state(*parameters.find(name), entry, param_groups_, state_);
  }
}

void ShardedOptimizer::save(
    torch::serialize::OutputArchive& /*archive*/) const {
  throw UsageError(
      "ShardedOptimizer::save: distributed states have no file format yet; "
      "save the tensors of state_dict");
}

void ShardedOptimizer::load(torch::serialize::InputArchive& /*archive*/) {
  throw UsageError(
      "ShardedOptimizer::load: distributed states have no file format yet; "
      "use load_state_dict");
}

ShardedOptimizer shard_optimizer(
    torch::optim::Optimizer&& optimizer,
    ShardingStage stage,
    const ShardOptions& options) {
  return ShardedOptimizer(std::move(optimizer), std::move(stage), options);
}

} // namespace tessera
