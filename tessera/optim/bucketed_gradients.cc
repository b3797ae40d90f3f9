// SPDX-License-Identifier: Apache-2.0
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <tessera/comm/record.h>
#include <tessera/comm/world.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucketed_gradients.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/step_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

namespace tessera {
namespace {

constexpr const char* kAsker = "optimizer.sync";
constexpr size_t kInFlight = 2; // reductions at a time where buffers are shared

// How a gradient differs from its parameter's placements: two bits per axis.
enum class AxisCode : uint8_t { kAsParameter, kSum, kAvg };
constexpr int kBitsPerAxis = 2;

int64_t code_of(const at::Tensor& gradient) {
  int64_t code = 0;
  const Placements& placements = placements_of(gradient);
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    AxisCode on_axis = AxisCode::kAsParameter;
    if (placements[axis].is_partial() &&
        placements[axis].op() == ReduceOp::kSum) {
      on_axis = AxisCode::kSum;
    } else if (
        placements[axis].is_partial() &&
        placements[axis].op() == ReduceOp::kAvg) {
      on_axis = AxisCode::kAvg;
    }
    code |= static_cast<int64_t>(on_axis) << (kBitsPerAxis * axis);
  }
  return code;
}

Placements placements_from(int64_t code, const at::Tensor& parameter) {
  Placements placements = placements_of(parameter);
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto on_axis = static_cast<AxisCode>(
        (code >> (kBitsPerAxis * axis)) & ((1 << kBitsPerAxis) - 1));
    if (on_axis != AxisCode::kAsParameter) {
      placements[axis] =
          Partial(on_axis == AxisCode::kSum ? ReduceOp::kSum : ReduceOp::kAvg);
    }
  }
  return placements;
}

// The bytes of the largest local tensor that any rank has: alike on all.
int64_t nominal_bytes(const at::Tensor& parameter) {
  const TensorSpec& spec = *spec_of(parameter);
  const std::vector<int64_t> first(spec.placements.size(), 0);
  int64_t numel = 1;
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    numel *= local_range(spec, dim, first).size;
  }
  return numel * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

void require_gradient(const at::Tensor& parameter) {
  require_distributed(parameter, "parameter");
  if (parameter.grad().defined()) {
    require_distributed(parameter.grad(), "gradient");
  }
}

} // namespace

void BucketedGradients::watch(const std::vector<at::Tensor>& parameters) {
  const std::scoped_lock lock(mutex_);
  for (const at::Tensor& parameter : parameters) {
    bool& watched = watched_[parameter.unsafeGetTensorImpl()];
    if (!watched && parameter.requires_grad()) {
      listen_to_gradient(parameter, weak_from_this());
      watched = true;
    }
  }
}

BucketedGradients::Place BucketedGradients::place_of(
    const at::Tensor& parameter) const {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  return found == places_.end() ? Place{} : found->second;
}

// A reduction in flight reads the gradient that is about to change.
void BucketedGradients::before_gradient(const at::Tensor& parameter) {
  const std::scoped_lock lock(mutex_);
  const Place place = place_of(parameter);
  if (place.bucket != nullptr) {
    const AskerScope asker(kAsker);
    place.bucket->finish_reduction();
    place.bucket->gradients().before_gradient(place.slot);
  }
}

void BucketedGradients::after_gradient(const at::Tensor& parameter) {
  const std::scoped_lock lock(mutex_);
  const Place place = place_of(parameter);
  if (place.bucket == nullptr) {
    arrivals_.push_back(parameter.unsafeGetTensorImpl());
    return;
  }
  place.bucket->gradients().take(place.slot);
  if (!reduces_in_backward()) {
    return;
  }
  begin_pass();
  const auto bucket = std::ranges::find(
      buckets_, place.bucket, [](const auto& owned) { return owned.get(); });
  arrived_[static_cast<size_t>(bucket - buckets_.begin())][place.slot] = true;
  const auto is_ready = [&](size_t i) {
    return std::ranges::find(arrived_[i], false) == arrived_[i].end();
  };
  while (next_to_start_ < buckets_.size() && is_ready(next_to_start_)) {
    start_next();
  }
}

// At the first gradient of a backward. Autograd calls back when it is done.
void BucketedGradients::begin_pass() {
  if (std::exchange(is_in_pass_, true)) {
    return;
  }
  next_to_start_ = 0;
  for (std::vector<bool>& arrived : arrived_) {
    arrived.assign(arrived.size(), false);
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) {
          self->end_pass();
        }
      });
}

void BucketedGradients::end_pass() {
  const std::scoped_lock lock(mutex_);
  const c10::NoGradGuard no_grad;
  while (is_in_pass_ && next_to_start_ < buckets_.size()) {
    start_next();
  }
  is_in_pass_ = false;
}

void BucketedGradients::start_next() {
  const AskerScope asker(kAsker);
  FlatBucket& bucket = *buckets_[next_to_start_];
  bucket.finish_reduction();
  make_room(next_to_start_);
  bucket.is_stale(); // takes what no hook has seen
  bucket.start_reduction();
  repeats_ += has_begun_[next_to_start_] && options_.stage == 1 ? 1 : 0;
  has_begun_[next_to_start_++] = true;
}

// Before a bucket is reduced, where the buffers of those before it are shared.
void BucketedGradients::make_room(size_t bucket) {
  if (options_.stage > 1 && bucket >= kInFlight) {
    buckets_[bucket - kInFlight]->finish_reduction();
  }
}

void BucketedGradients::finish_update() {
  is_reduced_ = false;
  has_begun_.assign(has_begun_.size(), false);
}

void BucketedGradients::prepare(const std::vector<at::Tensor>& parameters) {
  std::ranges::for_each(parameters, require_gradient);
  watch(parameters);
  is_in_pass_ = false; // a backward that threw may have left it
}

const GradientSummary& BucketedGradients::agree(
    const std::vector<at::Tensor>& parameters,
    const GradientQuestion& question) {
  const std::scoped_lock lock(mutex_);
  const AskerScope asker(kAsker);
  prepare(parameters);
  const auto take_all = [this] {
    bool changed = false;
    for (const auto& bucket : buckets_) {
      changed = bucket->is_stale() || changed;
    }
    return changed;
  };
  const bool changed = take_all();
  seen_present_ = present_here(parameters);
  exchange(parameters, question, changed);
  if (place_new(parameters)) {
    take_all();
  }
  return summary_;
}

const GradientSummary& BucketedGradients::reduce(
    const std::vector<at::Tensor>& parameters,
    const GradientQuestion& question) {
  const std::scoped_lock lock(mutex_);
  const AskerScope asker(kAsker);
  prepare(parameters);
  const bool is_first = !std::exchange(is_reduced_, true);
  const bool changed = reduce_buckets(is_first);
  seen_present_ = present_here(parameters);
  if (is_first || changed || !summary_.answers(question)) {
    exchange(parameters, question, changed);
    if (place_new(parameters)) {
      exchange(parameters, question, reduce_buckets(false));
    }
  }
  return summary_;
}

// What backward has not started, and what was written to since. All, or only
// what has changed on this rank. Returns whether anything has.
bool BucketedGradients::reduce_buckets(bool all) {
  bool changed = false;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    make_room(i);
    FlatBucket& bucket = *buckets_[i];
    const bool is_stale = bucket.is_stale();
    changed = changed || is_stale || (all && has_begun_[i]);
    if (is_stale || (all && !has_begun_[i])) {
      bucket.finish_reduction();
      bucket.start_reduction();
      repeats_ += has_begun_[i] ? 1 : 0;
    }
  }
  for (const auto& bucket : buckets_) {
    bucket->finish_reduction();
  }
  return changed;
}

std::vector<bool> BucketedGradients::present_here(
    const std::vector<at::Tensor>& parameters) const {
  std::vector<bool> present;
  for (const at::Tensor& parameter : parameters) {
    const Place place = place_of(parameter);
    present.push_back(
        place.bucket == nullptr
            ? parameter.grad().defined()
            : place.bucket->gradients().is_present(place.slot));
  }
  return present;
}

int64_t BucketedGradients::buffer_bytes() const {
  int64_t bytes = pool_->bytes();
  for (const auto& bucket : buckets_) {
    bytes += bucket->reduced_bytes();
  }
  return bytes;
}

BucketStatistics BucketedGradients::statistics() const {
  BucketStatistics statistics;
  for (const auto& bucket : buckets_) {
    (bucket->kind().cuts.empty() ? statistics.local_buckets
                                 : statistics.buckets) += 1;
    statistics.copies += bucket->gradients().copies();
  }
  statistics.repeated_reductions = repeats_;
  return statistics;
}

// One all_reduce carries norms, whether anything has changed, and the presence
// of each gradient.
void BucketedGradients::exchange(
    const std::vector<at::Tensor>& parameters,
    const GradientQuestion& question,
    bool changed) {
  if (parameters.empty()) {
    return;
  }
  std::vector<GradientPlace> places;
  places.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    const Place place = place_of(parameter);
    places.push_back({place.bucket, place.slot});
  }
  summarize(
      spec_of(parameters.front())->mesh.world(),
      question,
      buckets_,
      places,
      seen_present_,
      changed,
      summary_);
}

// Makes buckets of the parameters that have a gradient somewhere and no bucket.
bool BucketedGradients::place_new(const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> fresh;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (summary_.present[i] && place_of(parameters[i]).bucket == nullptr) {
      fresh.push_back(i);
    }
  }
  if (fresh.empty()) {
    return false;
  }
  // When the gradient became ready, then how it is placed, in one number: the
  // rank that saw it last decides both.
  constexpr int64_t kCodes = int64_t{1} << 24;
  std::vector<double> values;
  for (const size_t i : fresh) {
    const at::Tensor& parameter = parameters[i];
    const auto arrival =
        std::ranges::find(arrivals_, parameter.unsafeGetTensorImpl());
    values.push_back(
        parameter.grad().defined()
            ? static_cast<double>(
                  (arrival - arrivals_.begin()) * kCodes +
                  code_of(parameter.grad()))
            : -1);
  }
  all_reduce_values(
      spec_of(parameters.front())->mesh.world(), values, ReduceOp::kMax);
  std::vector<size_t> order(fresh.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::less(), [&](size_t i) {
    return static_cast<int64_t>(values[i]) / kCodes;
  });
  std::vector<at::Tensor> in_order;
  std::vector<Placements> gradients;
  for (const size_t i : order) {
    in_order.push_back(parameters[fresh[i]]);
    gradients.push_back(placements_from(
        static_cast<int64_t>(values[i]) % kCodes, in_order.back()));
  }
  arrivals_.clear();
  make_buckets(in_order, gradients);
  return true;
}

// Parameters of one kind, in the given order, cut by size; buckets in the order
// of their last parameters, since that is when they are complete.
void BucketedGradients::make_buckets(
    const std::vector<at::Tensor>& parameters,
    const std::vector<Placements>& gradients) {
  std::vector<std::pair<FlatKind, std::vector<size_t>>> kinds;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const TensorSpec& spec = *spec_of(parameters[i]);
    FlatKind kind =
        flat_kind(spec, gradients[i], find_axis(spec.mesh, options_.axis));
    kind.gradient_dtype = options_.precision.gradient_dtype(spec.dtype);
    auto found = std::ranges::find(
        kinds, kind, [](const auto& entry) { return entry.first; });
    if (found == kinds.end()) {
      found = kinds.insert(found, {kind, {}});
    }
    found->second.push_back(i);
  }
  struct Content {
    const FlatKind* kind;
    std::vector<size_t> members;
  };
  std::vector<Content> contents;
  for (const auto& [kind, members] : kinds) {
    std::vector<int64_t> bytes;
    for (const size_t i : members) {
      bytes.push_back(nominal_bytes(parameters[i]));
    }
    auto next = members.begin();
    for (const size_t count : runs_of_bytes(bytes, options_.bytes)) {
      const auto end = next + static_cast<std::ptrdiff_t>(count);
      contents.push_back({&kind, {next, end}});
      next = end;
    }
  }
  std::ranges::stable_sort(contents, std::ranges::less(), [](const auto& c) {
    return c.members.back();
  });
  for (const Content& content : contents) {
    std::vector<at::Tensor> members;
    std::vector<Placements> placements;
    for (const size_t i : content.members) {
      places_[parameters[i].unsafeGetTensorImpl()].slot = members.size();
      members.push_back(parameters[i]);
      placements.push_back(gradients[i]);
    }
    buckets_.push_back(std::make_unique<FlatBucket>(
        *content.kind,
        members,
        placements,
        [this](const DeviceMesh& mesh, int64_t axis) {
          return group_of(mesh, axis);
        },
        [&](const auto& slots, int64_t size, const Group* group) {
          const c10::ScalarType dtype = content.kind->gradient_dtype;
          return options_.stage > 1 && group != nullptr
              ? make_released_gradients(slots, dtype, size, group, pool_)
              : make_kept_gradients(slots, dtype, size, group);
        }));
    arrived_.emplace_back(members.size(), false);
    has_begun_.push_back(false);
    for (const at::Tensor& member : members) {
      places_[member.unsafeGetTensorImpl()].bucket = buckets_.back().get();
    }
  }
}

Group BucketedGradients::group_of(const DeviceMesh& mesh, int64_t axis) {
  const Group& shared = mesh.group(axis);
  if (!options_.overlap && options_.stage == 1) {
    return shared;
  }
  std::string key = shared.name();
  for (const int64_t rank : shared.world_ranks()) {
    key += fmt::format(",{}", rank);
  }
  auto own = own_groups_.find(key);
  if (own == own_groups_.end()) {
    const Group group = mesh.world().new_group(
        shared.world_ranks(), shared.name(), mesh.device().type());
    own = own_groups_.emplace(key, group.background()).first;
  }
  return own->second;
}

} // namespace tessera
