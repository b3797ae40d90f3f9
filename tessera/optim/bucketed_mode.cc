// SPDX-License-Identifier: Apache-2.0
//
// One step in flat buffers:
//   1. reduce: what backward has not started already is started, and all is
//   waited for. One small all_reduce tells which parameters have a gradient on
//   some rank, and the norm if somebody clips.
//   2. update: this rank's part of each buffer, in as few kernel calls as there
//   are runs of neighbours with the same options and the same count of steps.
//   Clipping is a factor that this pass multiplies with.
//   3. gather: one all_gather per buffer, begun as soon as its part is updated.
#include <ATen/ops/zeros_like.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucketed_gradients.h>
#include <tessera/optim/flat_state.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/one_pass_update.h>
#include <tessera/optim/step_mode.h>
#include <tessera/optim/update_kernel.h>

#include <algorithm>
#include <array>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;

// The optimizer's parameters, each once, in the order of the groups.
struct Listed {
  std::vector<at::Tensor> parameters;
  std::unordered_map<c10::TensorImpl*, const OptimizerParamGroup*> groups;
  std::unordered_map<c10::TensorImpl*, size_t> indices;
};

Listed list(const ParamGroups& groups) {
  Listed listed;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      c10::TensorImpl* impl = param.unsafeGetTensorImpl();
      if (listed.groups.emplace(impl, &group).second) {
        listed.indices.emplace(impl, listed.parameters.size());
        listed.parameters.push_back(param);
      }
    }
  }
  return listed;
}

// Neighbours in a buffer that one kernel call updates.
struct Run {
  FlatRange range;
  const OptimizerParamGroup* group;
  int64_t step; // this one, from 1
};

class BucketedMode : public StepMode {
 public:
  BucketedMode(
      UpdateRule rule,
      BucketOptions options,
      bool one_pass,
      const ParamGroups& groups)
      : rule_(rule),
        one_pass_(one_pass),
        gradients_(std::make_shared<BucketedGradients>(std::move(options))) {
    gradients_->watch(list(groups).parameters);
  }

  void step(ParamGroups& groups, StateMap& states) override;
  double clip(ParamGroups& groups, double max_norm, double norm_type) override;
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
  FlatShard reduced_shard(const at::Tensor& parameter) const override;
  AccumulationScope accumulate() override;
  BucketStatistics bucket_statistics() const override;
  OptimizerMemory memory(const StateMap& states) const override;

 private:
  const GradientSummary& reduce(
      const Listed& listed, std::optional<double> norm_type);
  std::vector<Run> runs_of(
      FlatBucket& bucket,
      const Listed& listed,
      const std::vector<bool>& present) const;
  std::array<void*, 3> state_pointers(const FlatBucket& bucket, const Run& run);
  void update(FlatBucket& bucket, const std::vector<Run>& runs, double scale);
  void update_in_place(FlatBucket& bucket, const std::vector<Run>& runs);
  std::vector<at::Tensor> states_of(const FlatBucket& bucket, const Run& run);
  std::vector<at::Tensor>& flat_states(const FlatBucket& bucket, size_t count);
  void place_loaded(const Listed& listed);

  UpdateRule rule_;
  bool one_pass_;
  std::shared_ptr<BucketedGradients> gradients_;
  int64_t reduction_ = 0; // whose gradients the scale belongs to
  double scale_ = 1; // what clipping multiplies them with
  std::unordered_map<const FlatBucket*, std::vector<at::Tensor>> states_;
  std::unordered_map<c10::TensorImpl*, ParameterState> loaded_; // not placed
};

const GradientSummary& BucketedMode::reduce(
    const Listed& listed, std::optional<double> norm_type) {
  const GradientSummary& summary =
      gradients_->reduce(listed.parameters, norm_type);
  if (summary.reduction != reduction_) {
    reduction_ = summary.reduction;
    scale_ = 1;
  }
  return summary;
}

void BucketedMode::step(ParamGroups& groups, StateMap& /*states*/) {
  const Listed listed = list(groups);
  const bool in_one_pass = one_pass_ && !gradients_->is_reduced();
  const GradientSummary& summary = in_one_pass
      ? gradients_->agree(listed.parameters)
      : reduce(listed, std::nullopt);
  place_loaded(listed);
  const AskerScope asker("optimizer.step");
  for (const auto& bucket : gradients_->buckets()) {
    const std::vector<Run> runs = runs_of(*bucket, listed, summary.present);
    if (in_one_pass && bucket->is_lendable()) {
      update_in_place(*bucket, runs);
      continue;
    }
    if (in_one_pass) {
      bucket->start_reduction();
      bucket->finish_reduction();
    }
    update(*bucket, runs, in_one_pass ? 1 : scale_);
    bucket->start_gather();
  }
  for (const auto& bucket : gradients_->buckets()) {
    bucket->finish_gather();
  }
  gradients_->finish_update();
}

double BucketedMode::clip(
    ParamGroups& groups, double max_norm, double norm_type) {
  const double norm = reduce(list(groups), norm_type).norm * scale_;
  scale_ *= clip_coefficient(max_norm, norm);
  return norm;
}

// Counts the step of every parameter that has a gradient, and returns this
// rank's share of them. What lies between neighbours is padding, zero in every
// buffer, and stays so.
std::vector<Run> BucketedMode::runs_of(
    FlatBucket& bucket,
    const Listed& listed,
    const std::vector<bool>& present) const {
  std::vector<Run> runs;
  bool is_neighbour = false; // of the last run
  for (BucketSlot& slot : bucket.slots()) {
    c10::TensorImpl* impl = slot.parameter.unsafeGetTensorImpl();
    const auto index = listed.indices.find(impl);
    if (index == listed.indices.end() || !present[index->second]) {
      is_neighbour = false;
      continue;
    }
    ++slot.steps;
    const FlatRange range = intersect(slot.range, bucket.part());
    if (range.size() == 0) {
      continue;
    }
    const OptimizerParamGroup* group = listed.groups.at(impl);
    if (is_neighbour && runs.back().group == group &&
        runs.back().step == slot.steps) {
      runs.back().range.end = range.end;
    } else {
      runs.push_back({range, group, slot.steps});
    }
    is_neighbour = true;
  }
  return runs;
}

std::vector<at::Tensor>& BucketedMode::flat_states(
    const FlatBucket& bucket, size_t count) {
  std::vector<at::Tensor>& flat = states_[&bucket];
  while (flat.size() < count) {
    flat.push_back(at::zeros_like(bucket.parameters(bucket.part())));
  }
  return flat;
}

// The states of a run, as flat views. They begin with what its group's options
// say.
std::vector<at::Tensor> BucketedMode::states_of(
    const FlatBucket& bucket, const Run& run) {
  const std::vector<StateField> fields =
      state_fields(rule_, run.group->options());
  const std::vector<at::Tensor>& flat = flat_states(bucket, fields.size());
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < fields.size(); ++i) {
    states.push_back(flat[i].narrow(
        0, run.range.begin - bucket.part().begin, run.range.size()));
    if (run.step == 1) {
      states.back().fill_(fields[i].initial);
    }
  }
  return states;
}

std::array<void*, 3> BucketedMode::state_pointers(
    const FlatBucket& bucket, const Run& run) {
  std::array<void*, 3> pointers = {};
  const std::vector<at::Tensor> states = states_of(bucket, run);
  std::ranges::transform(states, pointers.begin(), [](const at::Tensor& state) {
    return state.data_ptr();
  });
  return pointers;
}

void BucketedMode::update(
    FlatBucket& bucket, const std::vector<Run>& runs, double scale) {
  for (const Run& run : runs) {
    const at::Tensor parameters = bucket.parameters(run.range);
    const void* gradient = bucket.reduced(run.range).data_ptr();
    UpdateRange range;
    range.parameter = parameters.data_ptr();
    range.parameter_type = parameters.scalar_type();
    range.gradients = std::span(&gradient, 1);
    range.gradient_type = parameters.scalar_type();
    range.states = state_pointers(bucket, run);
    range.numel = run.range.size();
    range.first_element = run.range.begin;
    run_update(
        rule_,
        run.group->options(),
        {.step = run.step, .gradient_scale = scale},
        range);
  }
}

void BucketedMode::update_in_place(
    FlatBucket& bucket, const std::vector<Run>& runs) {
  std::vector<ShardRun> shard_runs;
  shard_runs.reserve(runs.size());
  for (const Run& run : runs) {
    shard_runs.push_back(
        {.begin = run.range.begin,
         .numel = run.range.size(),
         .options = &run.group->options(),
         .step = {.step = run.step},
         .states = state_pointers(bucket, run),
         .first_element = run.range.begin});
  }
  bucket.start_one_pass([&](const Group& group,
                            const at::Tensor& gradients,
                            const at::Tensor& parameters,
                            bool average) {
    return update_in_one_pass(
        group, rule_, gradients, parameters, average, std::move(shard_runs));
  });
}

// Of a slot: where this rank's share lies in its local tensor, and in the
// bucket's part.
struct SlotShare {
  ShareOf place;
  FlatRange in_part;
};

SlotShare share_of(const FlatBucket& bucket, const BucketSlot& slot) {
  FlatRange mine = intersect(slot.range, bucket.part());
  if (mine.size() == 0) {
    mine = {slot.range.begin, slot.range.begin};
  }
  const int64_t first = mine.size() == 0 ? mine.begin : bucket.part().begin;
  return {
      {spec_of(slot.parameter),
       local_of(slot.parameter),
       {mine.begin - slot.range.begin, mine.end - slot.range.begin}},
      {mine.begin - first, mine.end - first}};
}

at::Tensor in_part(const at::Tensor& flat, const FlatRange& range) {
  return flat.narrow(0, range.begin, range.size());
}

std::optional<ParameterState> BucketedMode::state_of(
    const ParamGroups& groups,
    const StateMap& /*states*/,
    const at::Tensor& parameter) const {
  const auto [bucket, index] = gradients_->place_of(parameter);
  const auto pending = loaded_.find(parameter.unsafeGetTensorImpl());
  if (pending != loaded_.end()) {
    return pending->second;
  }
  if (bucket == nullptr || bucket->slots()[index].steps == 0) {
    return std::nullopt;
  }
  const BucketSlot& slot = bucket->slots()[index];
  const SlotShare share = share_of(*bucket, slot);
  Placements summed = placements_of(parameter);
  for (const FlatCutAxis& cut : bucket->kind().cuts) {
    summed[static_cast<size_t>(cut.axis)] = Partial();
  }
  const Listed listed = list(groups);
  const auto* group = listed.groups.at(parameter.unsafeGetTensorImpl());
  ParameterState state{slot.steps, {}};
  // A rank without elements of the bucket's parameters has no flat states.
  const auto flat = states_.find(bucket);
  const at::Tensor nothing = bucket->parameters({0, 0});
  size_t i = 0;
  for (const StateField& field : state_fields(rule_, group->options())) {
    const at::Tensor mine = flat == states_.end()
        ? nothing
        : in_part(flat->second[i++], share.in_part);
    state.tensors[field.name] = whole_of(share.place, mine, summed);
  }
  return state;
}

void BucketedMode::load_state(
    const at::Tensor& parameter,
    ParameterState state,
    ParamGroups& groups,
    StateMap& /*states*/) {
  loaded_[parameter.unsafeGetTensorImpl()] = std::move(state);
  place_loaded(list(groups));
}

// What was loaded goes to where its parameter's state lives, once that is
// known.
void BucketedMode::place_loaded(const Listed& listed) {
  std::erase_if(loaded_, [&](const auto& entry) {
    const auto index = listed.indices.find(entry.first);
    if (index == listed.indices.end()) {
      return false;
    }
    const at::Tensor& parameter = listed.parameters[index->second];
    const auto [bucket, slot_index] = gradients_->place_of(parameter);
    if (bucket == nullptr) {
      return false;
    }
    BucketSlot& slot = bucket->slots()[slot_index];
    const SlotShare share = share_of(*bucket, slot);
    const auto& [steps, tensors] = entry.second;
    const std::vector<StateField> fields =
        state_fields(rule_, listed.groups.at(entry.first)->options());
    const std::vector<at::Tensor>& flat = flat_states(*bucket, fields.size());
    for (size_t i = 0; i < fields.size(); ++i) {
      copy_share(
          share.place,
          tensors.at(fields[i].name),
          in_part(flat[i], share.in_part));
    }
    slot.steps = steps;
    return true;
  });
}

at::Tensor BucketedMode::reduced_gradient(
    const at::Tensor& /*parameter*/) const {
  throw UsageError(
      "reduced_gradient: got kBucketed, where a rank has a flat range of each "
      "gradient, expected another mode; use reduced_shard");
}

FlatShard BucketedMode::reduced_shard(const at::Tensor& parameter) const {
  const auto [bucket, slot] = gradients_->place_of(parameter);
  if (bucket == nullptr) {
    return {};
  }
  const FlatRange& whole = bucket->slots()[slot].range;
  const FlatRange mine = intersect(whole, bucket->part());
  if (mine.size() == 0) {
    return {
        bucket->reduced({bucket->part().begin, bucket->part().begin}),
        spec_of(parameter)};
  }
  return {
      bucket->reduced(mine),
      spec_of(parameter),
      mine.begin - whole.begin,
      mine.end - whole.begin};
}

AccumulationScope BucketedMode::accumulate() {
  gradients_->hold(1);
  return AccumulationScope(std::shared_ptr<void>(
      gradients_.get(),
      [gradients = gradients_](void* /*unused*/) { gradients->hold(-1); }));
}

BucketStatistics BucketedMode::bucket_statistics() const {
  return gradients_->statistics();
}

OptimizerMemory BucketedMode::memory(const StateMap& /*states*/) const {
  OptimizerMemory memory;
  for (const auto& [bucket, states] : states_) {
    for (const at::Tensor& state : states) {
      memory.state_bytes += static_cast<int64_t>(state.nbytes());
    }
  }
  memory.gradient_bytes = gradients_->buffer_bytes();
  return memory;
}

} // namespace

std::unique_ptr<StepMode> make_bucketed_mode(
    UpdateRule rule,
    const ShardingStage& stage,
    const ShardOptions& options,
    const ParamGroups& groups) {
  if (options.one_pass && (options.overlap || stage.stage > 1)) {
    throw UsageError(
        "shard_optimizer: got one_pass with overlap or ShardingStage2, which "
        "reduce gradients during backward, expected neither; choose one");
  }
  return std::make_unique<BucketedMode>(
      rule,
      BucketOptions{
          stage.axis, options.bucket_bytes, options.overlap, stage.stage},
      options.one_pass,
      groups);
}

} // namespace tessera
