// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/dtensor/redistribute.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/sharding/redistribution.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

// One parameter's gradient after its reduction, beside the unreduced one that
// autograd holds. Knows which gradient it was made from, and in which version,
// so that nothing is reduced twice and a later write is noticed. Keeps its
// memory from step to step.
class ReducedGradient {
 public:
  // Whether this is `gradient` (distributed), reduced, and nobody wrote to it
  // since.
  bool is_of(const at::Tensor& gradient) const;

  // Starts to bring `gradient` to `target` and returns with the collective in
  // flight where the group can; `wait` completes it. Collective over the mesh
  // axes that change. `gradient` is only read, and kept alive until `wait`.
  void start(const at::Tensor& gradient, SpecPtr target);
  void wait();

  // Multiplies by `factor`, without touching the gradient that it was made
  // from.
  void scale(double factor);
  // Cuts every element to [-limit, limit], likewise.
  void cut(double limit);

  // This rank's local tensor, contiguous, and how it is placed. Undefined
  // before the first start.
  const at::Tensor& local() const {
    return local_;
  }
  SpecPtr spec() const {
    return spec_;
  }
  int64_t buffer_bytes() const;

 private:
  using WeakImpl =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void plan(SpecPtr from, SpecPtr to);
  void reduce_flat(
      const Group& group, ReduceOp op, c10::ArrayRef<int64_t> counts);
  void reduce_whole(const TensorSpec& from, const Group& group, ReduceOp op);
  void resize_buffer(c10::IntArrayRef sizes);

  // The steps of the last reduction, without those on axes of one rank, where
  // every placement holds the same values.
  struct Plan {
    SpecPtr from = nullptr;
    SpecPtr to = nullptr;
    std::vector<RedistributionStep> steps;
  };

  Plan plan_;
  std::optional<WeakImpl> source_;
  int64_t source_version_ = 0;
  SpecPtr spec_ = nullptr;
  at::Tensor local_;
  at::Tensor buffer_; // what collectives write into; local_ is it, or a view of
                      // it, or does not need it
  bool owns_local_ = false; // local_ shares no memory with the gradient
  at::Tensor gradient_; // from start to wait
  at::Tensor input_; // likewise
  WorkPtr work_;
  std::optional<PendingTensor> pending_;
};

} // namespace tessera
