// SPDX-License-Identifier: Apache-2.0
//
// One step in flat buffers:
//   1. reduce: what backward has not started already is started, and all is
//   waited for. One small all_reduce tells which parameters have a gradient on
//   some rank, and the norm if somebody clips.
//   2. update: this rank's part of each buffer, in as few kernel calls as there
//   are runs of neighbours with the same options and the same count of steps.
//   Clipping and the loss scale are a factor and a limit of this pass; a step
//   of scaled gradients that are not all finite ends before it.
//   3. gather: one all_gather per buffer, begun as soon as its part is updated.
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucket_state.h>
#include <tessera/optim/bucketed_gradients.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/one_pass_update.h>
#include <tessera/optim/slot_state.h>
#include <tessera/optim/step_mode.h>
#include <tessera/optim/update_kernel.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// The optimizer's parameters, each once, in the order of the groups.
struct Listed {
  const ParamGroups& groups;
  std::vector<at::Tensor> parameters;
  std::vector<size_t> group_of; // of each parameter
  std::unordered_map<c10::TensorImpl*, size_t> indices;

  const ParamOptions& options_of(size_t parameter) const {
    return groups[group_of[parameter]].options();
  }
};

Listed list(const ParamGroups& groups) {
  Listed listed{groups, {}, {}, {}};
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& param : groups[group].params()) {
      c10::TensorImpl* impl = param.unsafeGetTensorImpl();
      if (listed.indices.emplace(impl, listed.parameters.size()).second) {
        listed.parameters.push_back(param);
        listed.group_of.push_back(group);
      }
    }
  }
  return listed;
}

// What clipping has made of a group's gradients: times the factor, then cut to
// [-limit, limit]. Any sequence of clips is of that form.
struct Clip {
  double factor = 1;
  double limit = std::numeric_limits<double>::infinity();
};

// Neighbours in a buffer that one kernel call updates.
struct Run {
  FlatRange range;
  size_t group;
  const ParamOptions* options;
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
        precision_(options.precision),
        gradients_(std::make_shared<BucketedGradients>(std::move(options))) {
    gradients_->watch(list(groups).parameters);
  }

  bool step(ParamGroups& groups, StateMap& states) override;
  ClipOutcome clip(ParamGroups& groups, const ClipRequest& request) override;
  void clip_value(
      ParamGroups& groups, double limit, std::optional<size_t> group) override;
  void unscale(double scale) override {
    loss_scale_ = scale;
  }
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
  GradientQuestion question(
      const Listed& listed, std::optional<double> norm_type);
  const GradientSummary& reduce(
      const Listed& listed, std::optional<double> norm_type);
  double scale_of(const Clip& clip) const {
    return clip.factor / loss_scale_.value_or(1);
  }
  double norm_of(
      const GradientSummary& summary, const ClipRequest& request) const;
  void update_all(
      const Listed& listed, const std::vector<bool>& present, bool in_one_pass);
  std::vector<Run> runs_of(
      FlatBucket& bucket,
      const Listed& listed,
      const std::vector<bool>& present) const;
  UpdateStep step_of(const Run& run, std::optional<uint64_t> seed) const;
  void update(
      FlatBucket& bucket,
      const std::vector<Run>& runs,
      std::optional<uint64_t> seed);
  void update_in_place(
      FlatBucket& bucket,
      const std::vector<Run>& runs,
      std::optional<uint64_t> seed);
  BucketState& state_at(const FlatBucket& bucket);
  void place_loaded(const Listed& listed);

  UpdateRule rule_;
  bool one_pass_;
  Precision precision_;
  std::shared_ptr<BucketedGradients> gradients_;
  int64_t reduction_ = 0; // whose gradients the clips belong to
  std::vector<Clip> clips_; // of each group
  bool clips_are_old_ = true; // of gradients before the last step
  std::optional<double> loss_scale_; // until the end of a step
  std::unordered_map<const FlatBucket*, BucketState> states_;
  std::unordered_map<c10::TensorImpl*, ParameterState> loaded_; // not placed
};

// Norms are taken of the gradients as they are: scaled, not yet clipped by
// norm, but cut where the cut ones would be. Most steps have new gradients, so
// clips of the last one do not count until it is known that these are the same.
GradientQuestion BucketedMode::question(
    const Listed& listed, std::optional<double> norm_type) {
  clips_.resize(listed.groups.size());
  GradientQuestion question{
      listed.group_of, {}, norm_type, loss_scale_.has_value()};
  std::ranges::transform(
      clips_, std::back_inserter(question.limits), [&](const Clip& clip) {
        const Clip now = clips_are_old_ ? Clip{} : clip;
        return now.limit / scale_of(now);
      });
  return question;
}

const GradientSummary& BucketedMode::reduce(
    const Listed& listed, std::optional<double> norm_type) {
  const GradientSummary& summary =
      gradients_->reduce(listed.parameters, question(listed, norm_type));
  if (summary.reduction != reduction_) {
    reduction_ = summary.reduction;
    clips_.assign(clips_.size(), {});
  }
  clips_are_old_ = false;
  const GradientQuestion now = question(listed, norm_type);
  return summary.answers(now) ? summary
                              : gradients_->reduce(listed.parameters, now);
}

bool BucketedMode::step(ParamGroups& groups, StateMap& /*states*/) {
  const Listed listed = list(groups);
  const bool in_one_pass =
      one_pass_ && !gradients_->is_reduced() && !loss_scale_;
  const GradientSummary& summary = in_one_pass
      ? gradients_->agree(listed.parameters, question(listed, std::nullopt))
      : reduce(listed, std::nullopt);
  place_loaded(listed);
  const bool is_skipped = loss_scale_ &&
      std::ranges::find(summary.nonfinite, true) != summary.nonfinite.end();
  if (!is_skipped) {
    const AskerScope asker("optimizer.step");
    update_all(listed, summary.present, in_one_pass);
  }
  gradients_->finish_update();
  clips_are_old_ = true;
  loss_scale_.reset();
  return !is_skipped;
}

void BucketedMode::update_all(
    const Listed& listed, const std::vector<bool>& present, bool in_one_pass) {
  uint64_t index = 0;
  for (const auto& bucket : gradients_->buckets()) {
    const auto seed = precision_.rounding_seed(bucket->kind().dtype, index++);
    const std::vector<Run> runs = runs_of(*bucket, listed, present);
    state_at(*bucket).follow_parameters();
    if (in_one_pass && bucket->is_lendable()) {
      update_in_place(*bucket, runs, seed);
      continue;
    }
    if (in_one_pass) {
      bucket->start_reduction();
      bucket->finish_reduction();
    }
    update(*bucket, runs, seed);
    bucket->start_gather();
  }
  for (const auto& bucket : gradients_->buckets()) {
    bucket->finish_gather();
    state_at(*bucket).note_parameters();
  }
}

double BucketedMode::norm_of(
    const GradientSummary& summary, const ClipRequest& request) const {
  if (request.options.group || summary.norms.size() == 1) {
    const size_t group = request.options.group.value_or(0);
    return summary.norms[group] * scale_of(clips_[group]);
  }
  NormSum sum(request.norm_type);
  for (size_t group = 0; group < clips_.size(); ++group) {
    sum.add_norm(summary.norms[group] * scale_of(clips_[group]));
  }
  return NormSum::norm_of(sum.value(), request.norm_type);
}

ClipOutcome BucketedMode::clip(
    ParamGroups& groups, const ClipRequest& request) {
  const Listed listed = list(groups);
  const GradientSummary& summary = reduce(listed, request.norm_type);
  ClipOutcome outcome{norm_of(summary, request)};
  if (request.options.error_if_nonfinite && !std::isfinite(outcome.norm)) {
    outcome.is_refused = true;
    for (size_t i = 0; i < listed.parameters.size(); ++i) {
      if (summary.nonfinite[i] && request.covers(listed.group_of[i])) {
        outcome.nonfinite.push_back(listed.parameters[i]);
      }
    }
    return outcome;
  }
  const double coefficient = clip_coefficient(request.max_norm, outcome.norm);
  for (size_t group = 0; group < clips_.size(); ++group) {
    if (request.covers(group) && coefficient != 1) {
      clips_[group].factor *= coefficient;
      clips_[group].limit *= coefficient;
    }
  }
  return outcome;
}

void BucketedMode::clip_value(
    ParamGroups& groups, double limit, std::optional<size_t> group) {
  reduce(list(groups), std::nullopt);
  for (size_t i = 0; i < clips_.size(); ++i) {
    if (!group || *group == i) {
      clips_[i].limit = std::min(clips_[i].limit, limit);
    }
  }
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
    const size_t group = listed.group_of[index->second];
    if (is_neighbour && runs.back().group == group &&
        runs.back().step == slot.steps) {
      runs.back().range.end = range.end;
    } else {
      runs.push_back(
          {range, group, &listed.options_of(index->second), slot.steps});
    }
    is_neighbour = true;
  }
  return runs;
}

BucketState& BucketedMode::state_at(const FlatBucket& bucket) {
  return states_.try_emplace(&bucket, bucket, precision_).first->second;
}

UpdateStep BucketedMode::step_of(
    const Run& run, std::optional<uint64_t> seed) const {
  const Clip clip = clips_are_old_ ? Clip{} : clips_[run.group];
  return {
      .step = run.step,
      .gradient_scale = scale_of(clip),
      .gradient_limit = clip.limit,
      .rounding_seed = seed};
}

void BucketedMode::update(
    FlatBucket& bucket,
    const std::vector<Run>& runs,
    std::optional<uint64_t> seed) {
  BucketState& state = state_at(bucket);
  for (const Run& run : runs) {
    const at::Tensor parameters = bucket.parameters(run.range);
    const void* gradient = bucket.reduced(run.range).data_ptr();
    UpdateRange range;
    range.parameter = parameters.data_ptr();
    range.parameter_type = parameters.scalar_type();
    range.master = state.master_pointer(run.range);
    range.gradients = std::span(&gradient, 1);
    range.gradient_type = bucket.kind().gradient_dtype;
    range.states = state.state_pointers(
        state_fields(rule_, *run.options), run.range, run.step == 1);
    range.state_type = state.dtype();
    range.numel = run.range.size();
    range.first_element = run.range.begin;
    run_update(rule_, *run.options, step_of(run, seed), range);
  }
}

void BucketedMode::update_in_place(
    FlatBucket& bucket,
    const std::vector<Run>& runs,
    std::optional<uint64_t> seed) {
  BucketState& state = state_at(bucket);
  std::vector<ShardRun> shard_runs;
  shard_runs.reserve(runs.size());
  for (const Run& run : runs) {
    shard_runs.push_back(
        {.begin = run.range.begin,
         .numel = run.range.size(),
         .options = run.options,
         .step = {.step = run.step, .rounding_seed = seed},
         .master = state.master_pointer(run.range),
         .states = state.state_pointers(
             state_fields(rule_, *run.options), run.range, run.step == 1),
         .state_type = state.dtype(),
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
  return whole_state(
      *bucket,
      bucket->slots()[index],
      states_.at(bucket),
      state_fields(rule_, group_of(groups, parameter)->options()));
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
    const auto place = gradients_->place_of(parameter);
    if (place.bucket == nullptr) {
      return false;
    }
    place_state(
        entry.second,
        *place.bucket,
        place.bucket->slots()[place.slot],
        state_at(*place.bucket),
        state_fields(rule_, listed.options_of(index->second)));
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
  for (const auto& [bucket, state] : states_) {
    memory.state_bytes += state.state_bytes();
    memory.master_bytes += state.master_bytes();
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
          stage.axis,
          options.bucket_bytes,
          options.overlap,
          stage.stage,
          Precision(options)},
      options.one_pass,
      groups);
}

} // namespace tessera
