// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucket_state.h>

namespace tessera {

BucketState::BucketState(const FlatBucket& bucket, const Precision& precision)
    : bucket_(&bucket), dtype_(precision.state_dtype(bucket.kind().dtype)) {
  if (precision.has_master(bucket.kind().dtype)) {
    masters_ = bucket.parameters(bucket.part()).to(c10::kFloat);
    note_parameters();
  }
}

std::span<const at::Tensor> BucketState::states(size_t count) {
  states_.reserve(count);
  while (states_.size() < count) {
    const at::Tensor part = bucket_->parameters(bucket_->part());
    states_.push_back(at::zeros(part.sizes(), part.options().dtype(dtype_)));
  }
  return std::span(states_).first(count);
}

std::array<void*, 3> BucketState::state_pointers(
    const std::vector<StateField>& fields, const FlatRange& range, bool fresh) {
  std::array<void*, 3> pointers = {};
  const auto all = states(fields.size());
  for (size_t i = 0; i < fields.size(); ++i) {
    const at::Tensor state =
        all[i].narrow(0, range.begin - bucket_->part().begin, range.size());
    if (fresh) {
      state.fill_(fields[i].initial);
    }
    pointers[i] = state.data_ptr();
  }
  return pointers;
}

float* BucketState::master_pointer(const FlatRange& range) const {
  return masters_.defined()
      ? masters_.data_ptr<float>() + (range.begin - bucket_->part().begin)
      : nullptr;
}

// Versions only grow, so their sum tells whether any has.
int64_t BucketState::parameter_version() const {
  int64_t sum = 0;
  for (const BucketSlot& slot : bucket_->slots()) {
    sum += local_of(slot.parameter)._version();
  }
  return sum;
}

void BucketState::follow_parameters() {
  if (!masters_.defined() || version_ == parameter_version()) {
    return;
  }
  const at::Tensor parameters = bucket_->parameters(bucket_->part());
  const at::Tensor kept = masters_.to(parameters.scalar_type()) == parameters;
  masters_.copy_(at::where(kept, masters_, parameters.to(c10::kFloat)));
  note_parameters();
}

void BucketState::note_parameters() {
  version_ = parameter_version();
}

int64_t BucketState::state_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& state : states_) {
    bytes += static_cast<int64_t>(state.nbytes());
  }
  return bytes;
}

int64_t BucketState::master_bytes() const {
  return masters_.defined() ? static_cast<int64_t>(masters_.nbytes()) : 0;
}

} // namespace tessera
