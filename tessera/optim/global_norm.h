// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/reduce_op.h>
#include <tessera/mesh/tensor_spec.h>

#include <vector>

namespace tessera {

// A rank's part of one tensor, for the norm over many.
struct NormPart {
  at::Tensor local;
  SpecPtr spec; // no Partial axis
};

// The norm of all distinct elements of all parts on all ranks: of copies along
// Replicate axes, the first rank's counts. A positive number or infinity as
// `norm_type`. Per tensor in the tensor's precision (float32 for the half
// types), together in float64. Collective over the world, one scalar
// all_reduce, also with no parts. Blocks. Throws TimeoutError, PeerError.
double global_norm(
    const World& world, const std::vector<NormPart>& parts, double norm_type);

// A norm over many tensors while it adds up: the sum of powers, or the maximum,
// in float64.
class NormSum {
 public:
  explicit NormSum(double norm_type) : norm_type_(norm_type) {}

  // Empty tensors add nothing.
  void add(const at::Tensor& local);
  void add_norm(double norm);
  double value() const {
    return value_;
  }
  // How the values of several ranks come together.
  ReduceOp op() const;
  static double norm_of(double value, double norm_type);

 private:
  double norm_type_;
  double value_ = 0;
};

// Each value becomes its reduction over all ranks. Collective over the world.
// Blocks. Throws TimeoutError, PeerError.
void all_reduce_values(
    const World& world, std::vector<double>& values, ReduceOp op);

// What torch's clip_grad_norm_ multiplies gradients with: max_norm / (norm +
// 1e-6), at most 1; NaN stays NaN.
double clip_coefficient(double max_norm, double norm);

// The norms of tensors that different meshes hold, put together: `norm` is what
// the ranks of `mesh` agreed on.
struct MeshNorm {
  DeviceMesh mesh;
  double norm;
};
double combine_norms(
    const World& world, const std::vector<MeshNorm>& norms, double norm_type);

} // namespace tessera
