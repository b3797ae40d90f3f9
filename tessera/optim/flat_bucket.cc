// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/flat_bucket.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

// Zeros, in the memory that the group moves fastest.
at::Tensor flat_like(
    const at::Tensor& local, int64_t numel, const Group* group) {
  const at::TensorOptions options = local.options().requires_grad(false);
  return group == nullptr ? at::zeros({numel}, options)
                          : group->allocate({numel}, options).zero_();
}

// A view with the shape of `local`, and its strides where they leave no gaps.
at::Tensor view_like(
    const at::Tensor& flat, const FlatRange& range, const at::Tensor& local) {
  const at::Tensor part = flat.narrow(0, range.begin, range.size());
  return local.is_non_overlapping_and_dense()
      ? part.as_strided(local.sizes(), local.strides())
      : part.view(local.sizes());
}

void wait(WorkPtr& work) {
  if (work != nullptr) {
    std::exchange(work, nullptr)->wait();
  }
}

} // namespace

FlatBucket::FlatBucket(
    FlatKind kind,
    const std::vector<at::Tensor>& parameters,
    const std::vector<Placements>& gradients,
    const AxisGroup& group)
    : kind_(std::move(kind)) {
  std::vector<int64_t> numels;
  numels.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    numels.push_back(spec_of(parameter)->local_numel);
  }
  const FlatLayout layout = flat_layout(numels, kind_.parts());
  for (size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back({parameters[i], layout.slots[i]});
  }
  std::vector<GroupPosition> positions;
  for (const FlatCutAxis& cut : kind_.cuts) {
    groups_.push_back(group(kind_.mesh, cut.axis));
    positions.push_back({groups_.back().size(), groups_.back().rank()});
  }
  ranges_ = nested_ranges(layout.size, positions);
  const at::Tensor& like = local_of(parameters.front());
  const Group* outermost = groups_.empty() ? nullptr : &groups_.front();
  values_ = flat_like(like, layout.size, outermost);
  gradients_.push_back(flat_like(like, layout.size, outermost));
  for (size_t level = 0; level < groups_.size(); ++level) {
    gradients_.push_back(
        flat_like(like, ranges_[level + 1].size(), &groups_[level]));
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    adopt(slots_[i]);
    homes_.push_back(make_home(slots_[i], gradients[i]));
  }
}

// The local tensor keeps its identity, so that all who hold it see the buffer.
void FlatBucket::adopt(const BucketSlot& slot) {
  at::Tensor local = local_of(slot.parameter);
  const at::Tensor view = view_like(values_, slot.range, local);
  view.copy_(local);
  local.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  local.set_(
      view.storage(), view.storage_offset(), view.sizes(), view.strides());
}

// With a version counter of its own: views of one buffer would share one.
FlatBucket::Home FlatBucket::make_home(
    const BucketSlot& slot, const Placements& placements) const {
  Home home;
  home.view =
      view_like(gradients_.front(), slot.range, local_of(slot.parameter))
          .variable_data();
  home.gradient = wrap_local(
      home.view, with_placements(spec_of(slot.parameter), placements));
  return home;
}

bool FlatBucket::holds(const Home& home, const at::Tensor& gradient) const {
  return home.source && !home.source->expired() &&
      home.source->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
      home.source_version == local_of(gradient)._version();
}

void FlatBucket::bring_home(size_t slot) {
  const c10::NoGradGuard no_grad;
  Home& home = homes_[slot];
  const at::Tensor& gradient = slots_[slot].parameter.grad();
  if (!gradient.defined()) {
    home.source.reset();
    if (!home.is_zero) {
      home.view.zero_();
      home.is_zero = true;
    }
    return;
  }
  home.is_zero = false;
  if (gradient.is_same(home.gradient) || holds(home, gradient)) {
    return;
  }
  const Placements& placements = placements_of(home.gradient);
  const at::Tensor placed = placements_of(gradient) == placements
      ? gradient
      : redistribute(gradient.detach(), placements);
  ++copies_;
  home.view.copy_(local_of(placed));
  if (gradient.requires_grad()) { // a graph hangs on it, so it stays
    home.source.emplace(gradient.getIntrusivePtr());
    home.source_version = local_of(gradient)._version();
  } else {
    home.source.reset();
    slots_[slot].parameter.mutable_grad() = home.gradient;
  }
}

bool FlatBucket::is_stale() {
  bool stale = false;
  for (size_t i = 0; i < homes_.size(); ++i) {
    bring_home(i);
    stale = stale || homes_[i].reduced_version != homes_[i].view._version();
  }
  return stale;
}

void FlatBucket::start_reduction() {
  for (Home& home : homes_) {
    home.reduced_version = home.view._version();
  }
  cut_level_ = 0;
  if (!groups_.empty()) {
    reduce_level(0);
  }
}

void FlatBucket::reduce_level(size_t level) {
  const Group& group = groups_[level];
  const std::vector<int64_t> counts(
      static_cast<size_t>(group.size()), ranges_[level + 1].size());
  work_ = group.reduce_scatter(
      gradients_[level], gradients_[level + 1], counts, kind_.cuts[level].op);
  cut_level_ = level + 1;
}

void FlatBucket::finish_reduction() {
  if (!is_in_flight()) {
    return;
  }
  wait(work_);
  while (cut_level_ < groups_.size()) {
    reduce_level(cut_level_);
    wait(work_);
  }
  cut_level_ = 0;
}

void FlatBucket::start_gather() {
  gather_level_ = groups_.size();
  if (gather_level_ > 0) {
    gather_level(--gather_level_);
  }
}

// The part lies where the gather puts it.
void FlatBucket::gather_level(size_t level) {
  const Group& group = groups_[level];
  const FlatRange& part = ranges_[level + 1];
  const FlatRange& whole = ranges_[level];
  const std::vector<int64_t> counts(
      static_cast<size_t>(group.size()), part.size());
  work_ = group.all_gather(
      values_.narrow(0, part.begin, part.size()),
      values_.narrow(0, whole.begin, whole.size()),
      counts);
}

void FlatBucket::finish_gather() {
  wait(work_);
  while (gather_level_ > 0) {
    gather_level(--gather_level_);
    wait(work_);
  }
  for (const BucketSlot& slot : slots_) {
    slot.parameter.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor FlatBucket::parameters(const FlatRange& range) const {
  return values_.narrow(0, range.begin, range.size());
}

at::Tensor FlatBucket::gradients(const FlatRange& range) const {
  return gradients_.back().narrow(0, range.begin - part().begin, range.size());
}

int64_t FlatBucket::reduced_bytes() const {
  int64_t bytes = 0;
  for (size_t level = 1; level < gradients_.size(); ++level) {
    bytes += static_cast<int64_t>(gradients_[level].nbytes());
  }
  return bytes;
}

} // namespace tessera
