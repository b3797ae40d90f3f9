// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/flat_bucket.h>

#include <algorithm>
#include <span>
#include <utility>

namespace tessera {
namespace {

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
    const AxisGroup& group,
    const MakeGradients& make_gradients)
    : kind_(std::move(kind)) {
  std::vector<int64_t> numels;
  numels.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    numels.push_back(spec_of(parameter)->local_numel);
  }
  const FlatLayout layout = flat_layout(numels, kind_.parts());
  for (size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back({parameters[i], layout.slots[i], 0, gradients[i]});
  }
  std::vector<GroupPosition> positions;
  for (const FlatCutAxis& cut : kind_.cuts) {
    groups_.push_back(group(kind_.mesh, cut.axis));
    positions.push_back({groups_.back().size(), groups_.back().rank()});
  }
  ranges_ = nested_ranges(layout.size, positions);
  const at::TensorOptions options = local_of(parameters.front()).options();
  const Group* outermost = groups_.empty() ? nullptr : &groups_.front();
  values_ = flat_zeros(options, layout.size, outermost);
  unreduced_ = make_gradients(slots_, layout.size, outermost);
  reduced_.emplace_back();
  for (size_t level = 0; level < groups_.size(); ++level) {
    reduced_.push_back(flat_zeros(
        options.dtype(kind_.gradient_dtype),
        ranges_[level + 1].size(),
        &groups_[level]));
  }
  std::ranges::for_each(slots_, [this](const auto& slot) { adopt(slot); });
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

bool FlatBucket::is_stale() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    unreduced_->take(i);
  }
  return unreduced_->is_stale();
}

void FlatBucket::start_reduction() {
  is_in_flight_ = true;
  cut_level_ = 0;
  reduced_.front() = unreduced_->start();
  const auto adds = [this](size_t slot) {
    return unreduced_->adds_to_reduced(slot);
  };
  for (size_t i = 0; i < slots_.size() && !incoming_.defined(); ++i) {
    if (adds(i)) {
      incoming_ =
          flat_zeros(reduced_.back().options(), part().size(), &groups_.back());
    }
  }
  if (!groups_.empty()) {
    reduce_level(0);
  }
}

void FlatBucket::reduce_level(size_t level) {
  const Group& group = groups_[level];
  const std::vector<int64_t> counts(
      static_cast<size_t>(group.size()), ranges_[level + 1].size());
  const bool adds = incoming_.defined() && level + 1 == groups_.size();
  work_ = group.reduce_scatter(
      reduced_[level],
      adds ? incoming_ : reduced_[level + 1],
      counts,
      kind_.cuts[level].op);
  cut_level_ = level + 1;
}

void FlatBucket::finish_reduction() {
  if (!is_in_flight_) {
    return;
  }
  wait(work_);
  while (cut_level_ < groups_.size()) {
    reduce_level(cut_level_);
    wait(work_);
  }
  if (incoming_.defined()) {
    add_incoming();
  }
  if (!groups_.empty()) {
    reduced_.front().reset();
  }
  unreduced_->finish();
  is_in_flight_ = false;
}

void FlatBucket::add_incoming() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const FlatRange range = intersect(slots_[i].range, part());
    if (range.size() == 0) {
      continue;
    }
    const at::Tensor mine = reduced(range);
    const at::Tensor more =
        incoming_.narrow(0, range.begin - part().begin, range.size());
    if (unreduced_->adds_to_reduced(i)) {
      mine.add_(more);
    } else {
      mine.copy_(more);
    }
  }
  incoming_.reset();
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

bool FlatBucket::is_lendable() const {
  return groups_.size() == 1 && groups_.front().size() > 1 &&
      (kind_.cuts.front().op == ReduceOp::kSum ||
       kind_.cuts.front().op == ReduceOp::kAvg) &&
      groups_.front().can_lend(std::span(&values_, 1));
}

void FlatBucket::start_one_pass(const OnePass& one_pass) {
  work_ = one_pass(
      groups_.front(),
      unreduced_->start(),
      values_,
      kind_.cuts.front().op == ReduceOp::kAvg);
  gather_level_ = 0;
}

at::Tensor FlatBucket::parameters(const FlatRange& range) const {
  return values_.narrow(0, range.begin, range.size());
}

at::Tensor FlatBucket::reduced(const FlatRange& range) const {
  return reduced_.back().narrow(0, range.begin - part().begin, range.size());
}

int64_t FlatBucket::reduced_bytes() const {
  int64_t bytes = 0;
  for (size_t level = 1; level < reduced_.size(); ++level) {
    bytes += static_cast<int64_t>(reduced_[level].nbytes());
  }
  return bytes;
}

} // namespace tessera
