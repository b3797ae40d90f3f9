// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucket_gradients.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace tessera {
namespace {

struct Share {
  at::Tensor marker; // what `p.grad()` is once its value has been taken
  bool is_filled = false; // the buffer holds something of it
  bool is_reduced = false; // so does what was reduced before, still wanted
  bool had_gradient = false; // since zero_grad
  bool adds = false; // autograd's next gradient is to be added
};

class ReleasedGradients final : public BucketGradients {
 public:
  ReleasedGradients(
      const std::vector<BucketSlot>& slots,
      c10::ScalarType dtype,
      int64_t size,
      const Group* group,
      std::shared_ptr<FlatBufferPool> pool)
      : slots_(slots),
        dtype_(dtype),
        size_(size),
        group_(group),
        pool_(std::move(pool)) {
    pool_->announce(dtype, size);
    shares_.reserve(slots.size());
    for (const BucketSlot& slot : slots) {
      shares_.push_back({marker_of(slot)});
    }
  }

  void before_gradient(size_t slot) override;
  void take(size_t slot) override;
  bool is_stale() const override {
    return is_new_ || std::ranges::any_of(shares_, [](const Share& s) {
             return s.is_filled;
           });
  }
  bool is_present(size_t slot) const override {
    return shares_[slot].had_gradient;
  }
  const at::Tensor& start() override;
  bool adds_to_reduced(size_t slot) const override {
    return adds_[slot];
  }
  void finish() override {
    flat_.reset();
    pool_->release(std::exchange(buffer_, at::Tensor()));
  }

 private:
  // One element that is all of them.
  static at::Tensor marker_of(const BucketSlot& slot) {
    const at::Tensor& local = local_of(slot.parameter);
    const at::Tensor nan = at::full(
        {},
        std::numeric_limits<double>::quiet_NaN(),
        local.options().requires_grad(false));
    return wrap_local(
        nan.expand(local.sizes()),
        with_placements(spec_of(slot.parameter), slot.gradient));
  }
  void note_dropped(size_t slot);
  const at::Tensor& flat();
  void zero_what_is_not_filled();

  const std::vector<BucketSlot>& slots_;
  c10::ScalarType dtype_; // of the buffer
  int64_t size_;
  const Group* group_;
  std::shared_ptr<FlatBufferPool> pool_;
  at::Tensor buffer_; // of the pool
  at::Tensor flat_; // what the bucket needs of it
  std::vector<Share> shares_;
  std::vector<bool> adds_; // as of the last start
  bool is_new_ = true; // nothing was reduced yet
};

// The program has called zero_grad, or reset the gradient.
void ReleasedGradients::note_dropped(size_t slot) {
  Share& share = shares_[slot];
  share.is_filled = false;
  share.is_reduced = false;
  share.had_gradient = false;
}

const at::Tensor& ReleasedGradients::flat() {
  if (!flat_.defined()) {
    const at::Tensor& like = local_of(slots_.front().parameter);
    buffer_ = pool_->acquire(like.options().dtype(dtype_), size_, group_);
    flat_ = buffer_.narrow(0, 0, size_);
  }
  return flat_;
}

// Slots without a gradient, and the padding.
void ReleasedGradients::zero_what_is_not_filled() {
  int64_t end = 0; // of the last filled slot
  const auto zero_up_to = [&](int64_t begin) {
    if (begin > end) {
      flat_.narrow(0, end, begin - end).zero_();
    }
  };
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (shares_[i].is_filled) {
      zero_up_to(slots_[i].range.begin);
      end = slots_[i].range.end;
    }
  }
  zero_up_to(size_);
}

// Autograd would add to the marker, so it goes.
void ReleasedGradients::before_gradient(size_t slot) {
  at::Tensor& gradient =
      const_cast<at::Tensor&>(slots_[slot].parameter).mutable_grad();
  if (gradient.is_same(shares_[slot].marker)) {
    gradient.reset();
    shares_[slot].adds = true;
  } else {
    note_dropped(slot);
  }
}

void ReleasedGradients::take(size_t slot) {
  const c10::NoGradGuard no_grad;
  Share& share = shares_[slot];
  at::Tensor parameter = slots_[slot].parameter;
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) {
    note_dropped(slot);
    return;
  }
  if (gradient.is_same(share.marker)) {
    return;
  }
  if (!std::exchange(share.adds, false)) { // the program has set another
    note_dropped(slot);
  }
  const at::Tensor view =
      view_like(flat(), slots_[slot].range, local_of(parameter));
  const at::Tensor local = placed_gradient(slots_[slot], gradient);
  if (share.is_filled) {
    view.add_(local);
  } else {
    view.copy_(local);
  }
  ++copies_;
  share.is_filled = true;
  share.had_gradient = true;
  parameter.mutable_grad() = share.marker;
}

// Other ranks may have had gradients that this one had not, so that all slots
// have been reduced then.
const at::Tensor& ReleasedGradients::start() {
  const at::Tensor& input = flat();
  zero_what_is_not_filled();
  adds_.clear();
  for (size_t i = 0; i < shares_.size(); ++i) {
    adds_.push_back(shares_[i].is_reduced);
    shares_[i].is_filled = false;
    shares_[i].is_reduced = true;
    at::Tensor parameter = slots_[i].parameter;
    parameter.mutable_grad() = shares_[i].marker;
  }
  is_new_ = false;
  return input;
}

} // namespace

void FlatBufferPool::announce(c10::ScalarType dtype, int64_t numel) {
  int64_t& largest = largest_[dtype];
  largest = std::max(largest, numel);
}

at::Tensor FlatBufferPool::acquire(
    const at::TensorOptions& options, int64_t numel, const Group* group) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto found = std::ranges::find_if(free_, [&](const at::Tensor& buffer) {
    return buffer.scalar_type() == dtype && buffer.numel() >= numel;
  });
  if (found != free_.end()) {
    at::Tensor buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }
  at::Tensor buffer =
      flat_zeros(options, std::max(numel, largest_[dtype]), group);
  bytes_ += static_cast<int64_t>(buffer.nbytes());
  return buffer;
}

void FlatBufferPool::release(at::Tensor buffer) {
  if (buffer.defined()) {
    free_.push_back(std::move(buffer));
  }
}

std::unique_ptr<BucketGradients> make_released_gradients(
    const std::vector<BucketSlot>& slots,
    c10::ScalarType dtype,
    int64_t size,
    const Group* group,
    std::shared_ptr<FlatBufferPool> pool) {
  return std::make_unique<ReleasedGradients>(
      slots, dtype, size, group, std::move(pool));
}

} // namespace tessera
