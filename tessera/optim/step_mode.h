// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/optim/optimizer_state.h>
#include <tessera/optim/sharded_optimizer.h>
#include <tessera/optim/update_rule.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
using StateMap = ska::flat_hash_map<void*, std::unique_ptr<ParamState>>;

// See ShardedOptimizer::clip_grad_norm.
struct ClipRequest {
  double max_norm;
  double norm_type;
  ClipOptions options;

  bool covers(size_t group) const {
    return !options.group || *options.group == group;
  }
};

struct ClipOutcome {
  double norm = 0;
  // With error_if_nonfinite: nothing was clipped.
  bool is_refused = false;
  std::vector<at::Tensor> nonfinite = {}; // parameters, alike on all ranks
};

// What a sharded optimizer does with gradients, states and parameters. A mode
// owns all that it keeps from step to step but torch's own state map. Every
// call is outside autograd.
class StepMode {
 public:
  StepMode() = default;
  StepMode(const StepMode&) = delete;
  StepMode& operator=(const StepMode&) = delete;
  virtual ~StepMode() = default;

  // See ShardedOptimizer. Collective. Returns whether it has updated: always,
  // but after `unscale`.
  virtual bool step(ParamGroups& groups, StateMap& states) = 0;
  virtual ClipOutcome clip(ParamGroups& groups, const ClipRequest& request) = 0;
  virtual void clip_value(
      ParamGroups& groups, double limit, std::optional<size_t> group) = 0;
  // See ShardedOptimizer. Not collective.
  virtual void unscale(double scale);

  // The whole state of one parameter; none if it was never updated. Collective
  // over its mesh.
  virtual std::optional<ParameterState> state_of(
      const ParamGroups& groups,
      const StateMap& states,
      const at::Tensor& parameter) const = 0;
  // Replaces the state of one parameter, now or when its first gradient shows
  // where it lives. Not collective.
  virtual void load_state(
      const at::Tensor& parameter,
      ParameterState state,
      ParamGroups& groups,
      StateMap& states) = 0;

  virtual at::Tensor reduced_gradient(const at::Tensor& parameter) const = 0;
  virtual FlatShard reduced_shard(const at::Tensor& parameter) const;
  virtual AccumulationScope accumulate() {
    return AccumulationScope(nullptr);
  }
  virtual BucketStatistics bucket_statistics() const {
    return {};
  }
  virtual OptimizerMemory memory(const StateMap& states) const = 0;
};

// One tensor at a time: kImplicit, kAllReduce and kReduceScatter. `sync` is
// asked anew in each call, and says one of the three.
std::unique_ptr<StepMode> make_tensorwise_mode(
    UpdateRule rule, std::string axis, std::function<GradientSync()> sync);

// Flat buffers: kBucketed.
std::unique_ptr<StepMode> make_bucketed_mode(
    UpdateRule rule,
    const ShardingStage& stage,
    const ShardOptions& options,
    const ParamGroups& groups);

// -1 where the mesh has no such axis.
int64_t find_axis(const DeviceMesh& mesh, const std::string& name);

// Throws UsageError for a plain tensor.
void require_distributed(const at::Tensor& tensor, const char* what);

// The group of a parameter. Null if it is in none.
const torch::optim::OptimizerParamGroup* group_of(
    const ParamGroups& groups, const at::Tensor& parameter);

// Throws UsageError unless the state has exactly the fields that the rule keeps
// under these options, in the parameter's shape.
void require_fitting_state(
    UpdateRule rule,
    const ParamOptions& options,
    const at::Tensor& parameter,
    const ParameterState& state);

// Of the first parameter; none without parameters.
World world_of(const ParamGroups& groups);

} // namespace tessera
