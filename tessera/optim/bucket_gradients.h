// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/mesh/placement.h>
#include <tessera/optim/flat_layout.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace tessera {

// A parameter's place in a bucket.
struct BucketSlot {
  at::Tensor parameter;
  FlatRange range; // in the flat buffers
  int64_t steps = 0; // updates so far
  Placements gradient; // how autograd's gradients are placed
};

// A flat tensor of zeros, in the memory that the group moves fastest; without
// a group, anywhere.
at::Tensor flat_zeros(
    const at::TensorOptions& options, int64_t numel, const Group* group);

// The view of a range with the shape of `local`, and with its strides where
// they leave no gaps.
at::Tensor view_like(
    const at::Tensor& flat, const FlatRange& range, const at::Tensor& local);

// The local tensor of a slot's gradient, placed as the bucket's others.
at::Tensor placed_gradient(const BucketSlot& slot, const at::Tensor& gradient);

// The unreduced gradients of one bucket: how they get from `p.grad()` into a
// flat buffer, and what `p.grad()` is afterwards. The buffer's dtype may differ
// from the parameters'.
class BucketGradients {
 public:
  BucketGradients() = default;
  BucketGradients(const BucketGradients&) = delete;
  BucketGradients& operator=(const BucketGradients&) = delete;
  virtual ~BucketGradients() = default;

  // Autograd is about to add to the slot's gradient.
  virtual void before_gradient(size_t /*slot*/) {}
  // Takes what `p.grad()` is now: autograd has added to it, or the program has
  // written to it, set it or dropped it.
  virtual void take(size_t slot) = 0;
  // Whether something was taken since the last reduction began, or there was
  // none yet.
  virtual bool is_stale() const = 0;
  // Whether the parameter has a gradient.
  virtual bool is_present(size_t slot) const = 0;

  // The flat buffer to be reduced now; nobody writes to it before `finish`.
  virtual const at::Tensor& start() = 0;
  // What is reduced belongs to earlier gradients of the slot that have been
  // reduced already. As of `start`.
  virtual bool adds_to_reduced(size_t slot) const = 0;
  virtual void finish() {}

  // Of gradients into the buffer.
  int64_t copies() const {
    return copies_;
  }

 protected:
  int64_t copies_ = 0;
};

// Stage 1: `p.grad()` becomes a view of the buffer once it is there, so that
// further backward passes accumulate in place, and stays the unreduced Partial.
std::unique_ptr<BucketGradients> make_kept_gradients(
    const std::vector<BucketSlot>& slots,
    c10::ScalarType dtype,
    int64_t size,
    const Group* group);

// Buffers that buckets use in turn while their gradients are unreduced. Each is
// as large as the largest bucket of its dtype that was announced.
class FlatBufferPool {
 public:
  void announce(c10::ScalarType dtype, int64_t numel);
  // At least `numel` elements, with any values.
  at::Tensor acquire(
      const at::TensorOptions& options, int64_t numel, const Group* group);
  void release(at::Tensor buffer);
  int64_t bytes() const { // of all that exist
    return bytes_;
  }

 private:
  std::vector<at::Tensor> free_;
  std::map<c10::ScalarType, int64_t> largest_;
  int64_t bytes_ = 0;
};

// Stage 2: the buffer exists from the first gradient to the end of the
// reduction. `p.grad()` is a distributed tensor without memory from then on: it
// reads as NaN, and cannot be written to; it tells `zero_grad` from gradients
// that accumulate.
std::unique_ptr<BucketGradients> make_released_gradients(
    const std::vector<BucketSlot>& slots,
    c10::ScalarType dtype,
    int64_t size,
    const Group* group,
    std::shared_ptr<FlatBufferPool> pool);

} // namespace tessera
