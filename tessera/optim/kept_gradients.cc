// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/bucket_gradients.h>

#include <algorithm>
#include <optional>

namespace tessera {
namespace {

// A slot's place in the buffer.
struct Home {
  at::Tensor view; // shaped as the local tensor
  at::Tensor gradient; // distributed, around the view
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> source;
  int64_t source_version = 0; // of a gradient that stays outside
  bool is_zero = true;
  int64_t reduced_version = -1; // of the view, when a reduction began

  bool holds(const at::Tensor& other) const {
    return source && !source->expired() &&
        source->_unsafe_get_target() == other.unsafeGetTensorImpl() &&
        source_version == local_of(other)._version();
  }
};

class KeptGradients final : public BucketGradients {
 public:
  KeptGradients(
      const std::vector<BucketSlot>& slots,
      c10::ScalarType dtype,
      int64_t size,
      const Group* group)
      : slots_(slots) {
    const at::Tensor& like = local_of(slots.front().parameter);
    buffer_ = flat_zeros(like.options().dtype(dtype), size, group);
    homes_.reserve(slots.size());
    for (const BucketSlot& slot : slots) {
      homes_.push_back(make_home(slot));
    }
  }

  void take(size_t slot) override;
  bool is_stale() const override {
    return std::ranges::any_of(homes_, [](const Home& home) {
      return home.reduced_version != home.view._version();
    });
  }
  bool is_present(size_t slot) const override {
    return slots_[slot].parameter.grad().defined();
  }
  const at::Tensor& start() override {
    for (Home& home : homes_) {
      home.reduced_version = home.view._version();
    }
    return buffer_;
  }
  bool adds_to_reduced(size_t /*slot*/) const override {
    return false;
  }

 private:
  // With a version counter of its own: views of one buffer would share one.
  Home make_home(const BucketSlot& slot) const {
    Home home;
    home.view = view_like(buffer_, slot.range, local_of(slot.parameter))
                    .variable_data();
    const TensorSpec& spec = *spec_of(slot.parameter);
    home.gradient = wrap_local(
        home.view,
        intern(
            spec.mesh,
            slot.gradient,
            spec.sizes,
            spec.strides,
            buffer_.scalar_type()));
    return home;
  }

  const std::vector<BucketSlot>& slots_;
  at::Tensor buffer_;
  std::vector<Home> homes_;
};

void KeptGradients::take(size_t slot) {
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
  if (gradient.is_same(home.gradient) || home.holds(gradient)) {
    return;
  }
  ++copies_;
  home.view.copy_(placed_gradient(slots_[slot], gradient));
  if (gradient.requires_grad()) { // a graph hangs on it, so it stays
    home.source.emplace(gradient.getIntrusivePtr());
    home.source_version = local_of(gradient)._version();
  } else {
    home.source.reset();
    slots_[slot].parameter.mutable_grad() = home.gradient;
  }
}

} // namespace

at::Tensor flat_zeros(
    const at::TensorOptions& options, int64_t numel, const Group* group) {
  const at::TensorOptions plain = options.requires_grad(false);
  return group == nullptr ? at::zeros({numel}, plain)
                          : group->allocate({numel}, plain).zero_();
}

at::Tensor view_like(
    const at::Tensor& flat, const FlatRange& range, const at::Tensor& local) {
  const at::Tensor part = flat.narrow(0, range.begin, range.size());
  return local.is_non_overlapping_and_dense()
      ? part.as_strided(local.sizes(), local.strides())
      : part.view(local.sizes());
}

at::Tensor placed_gradient(const BucketSlot& slot, const at::Tensor& gradient) {
  return local_of(
      placements_of(gradient) == slot.gradient
          ? gradient
          : redistribute(gradient.detach(), slot.gradient));
}

std::unique_ptr<BucketGradients> make_kept_gradients(
    const std::vector<BucketSlot>& slots,
    c10::ScalarType dtype,
    int64_t size,
    const Group* group) {
  return std::make_unique<KeptGradients>(slots, dtype, size, group);
}

} // namespace tessera
