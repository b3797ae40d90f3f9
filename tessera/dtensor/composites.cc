// SPDX-License-Identifier: Apache-2.0
// Composite operators of libtorch that make a plain tensor on the way and write
// distributed ones into it. Ours start from a distributed tensor.
#include <ATen/ops/scatter.h>
#include <ATen/ops/unsqueeze.h>
#include <torch/library.h>

namespace tessera {
namespace {

// The gradient of max, min, median over a dim, of topk and of sort: what comes
// in goes to the places that were selected.
at::Tensor value_selecting_reduction_backward(
    const at::Tensor& gradient,
    int64_t dim,
    const at::Tensor& indices,
    c10::SymIntArrayRef sizes,
    bool keepdim) {
  const at::Tensor zeros = gradient.new_zeros_symint(sizes);
  if (keepdim || sizes.empty()) {
    return at::scatter(zeros, dim, indices, gradient);
  }
  return at::scatter(
      zeros, dim, at::unsqueeze(indices, dim), at::unsqueeze(gradient, dim));
}

} // namespace
} // namespace tessera

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl(
      "value_selecting_reduction_backward",
      &tessera::value_selecting_reduction_backward);
}
