// SPDX-License-Identifier: Apache-2.0
// Composite operators of libtorch that make a plain tensor on the way and write
// distributed ones into it. Ours start from a distributed tensor. Found by
// running forward and backward of what libtorch composes, see
// composites_test.cc.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/unsqueeze.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <vector>

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

at::Tensor trace_backward(
    const at::Tensor& gradient, c10::SymIntArrayRef sizes) {
  at::Tensor result = gradient.new_zeros_symint(sizes);
  result.diagonal().copy_(gradient);
  return result;
}

// The gradient of cummax and cummin: a place gets all that its value won.
at::Tensor cummaxmin_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& indices,
    int64_t dim) {
  return input.numel() == 0
      ? input
      : at::zeros_like(input).scatter_add(dim, indices, gradient);
}

at::Tensor one_hot(const at::Tensor& self, int64_t classes) {
  if (self.scalar_type() != at::kLong) {
    throw UsageError(fmt::format(
        "one_hot: got a tensor of {}, expected int64; convert it first",
        c10::toString(self.scalar_type())));
  }
  if (self.numel() == 0 && classes < 1) {
    throw UsageError(
        "one_hot: got no element that tells the number of classes; give it");
  }
  if (self.numel() > 0) {
    const auto least = self.min().item<int64_t>();
    const auto most = self.max().item<int64_t>();
    classes = classes == -1 ? most + 1 : classes;
    if (least < 0 || most >= classes) {
      throw UsageError(fmt::format(
          "one_hot: got values from {} to {}, expected 0 to {}; give more "
          "classes or mend the values",
          least,
          most,
          classes - 1));
    }
  }
  return at::eq(
             at::unsqueeze(self, -1),
             at::arange(classes, self.options().device(self.device())))
      .to(at::kLong);
}

at::Tensor pad_sequence(
    at::TensorList sequences,
    bool batch_first,
    double value,
    std::string_view side) {
  if (side != "left" && side != "right") {
    throw UsageError(fmt::format(
        "pad_sequence: got padding_side {}; expected left or right", side));
  }
  int64_t longest = 0;
  for (const at::Tensor& sequence : sequences) {
    longest = std::max(longest, sequence.size(0));
  }
  std::vector<at::Tensor> padded;
  for (const at::Tensor& sequence : sequences) {
    std::vector<int64_t> pad(static_cast<size_t>(2 * sequence.dim()), 0);
    pad[pad.size() - (side == "left" ? 2 : 1)] = longest - sequence.size(0);
    padded.push_back(at::constant_pad_nd(sequence, pad, value));
  }
  return at::stack(padded, batch_first ? 0 : 1);
}

// The adjoint of the derivative in direction G is the derivative of the adjoint
// matrix's exponential in that direction, and that is the right upper block of
// exp([[A, G], [0, A]]) (Najfeld and Havel, 1995).
struct MatrixExp : public torch::autograd::Function<MatrixExp> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& self) {
    context->save_for_backward({self});
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::linalg_matrix_exp(self);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const at::Tensor adjoint = context->get_saved_variables()[0].mH();
    const int64_t n = adjoint.size(-1);
    const at::Tensor above = at::cat({adjoint, gradients[0]}, -1);
    const at::Tensor below = at::cat({at::zeros_like(adjoint), adjoint}, -1);
    return {at::linalg_matrix_exp(at::cat({above, below}, -2))
                .narrow(-2, 0, n)
                .narrow(-1, n, n)};
  }
};

at::Tensor linalg_matrix_exp(const at::Tensor& self) {
  return MatrixExp::apply(self);
}

} // namespace
} // namespace tessera

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl(
      "value_selecting_reduction_backward",
      &tessera::value_selecting_reduction_backward);
  m.impl("trace_backward", &tessera::trace_backward);
  m.impl("cummaxmin_backward", &tessera::cummaxmin_backward);
  m.impl("one_hot", &tessera::one_hot);
  m.impl("pad_sequence", &tessera::pad_sequence);
  m.impl("linalg_matrix_exp", &tessera::linalg_matrix_exp);
}
