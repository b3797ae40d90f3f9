// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/TensorOptions.h>
#include <tessera/models/layers.h>

namespace tessera {
namespace {

at::TensorOptions options() {
  return at::TensorOptions(c10::get_default_dtype());
}

// float32 in place of 16 bits.
at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == c10::kHalf || x.scalar_type() == c10::kBFloat16
      ? x.to(c10::kFloat)
      : x;
}

at::Tensor fresh_normal(at::IntArrayRef sizes, double std) {
  return at::empty(sizes, options()).normal_(0, std);
}

} // namespace

LinearLayer::LinearLayer(int64_t in, int64_t out, Options layer) {
  weight = register_parameter("weight", fresh_normal({out, in}, layer.std));
  if (layer.bias) {
    bias = register_parameter("bias", at::zeros({out}, options()));
  }
}

at::Tensor LinearLayer::forward(const at::Tensor& x) const {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

EmbeddingLayer::EmbeddingLayer(int64_t rows, int64_t dim, double std) {
  weight = register_parameter("weight", fresh_normal({rows, dim}, std));
}

at::Tensor EmbeddingLayer::forward(const at::Tensor& ids) const {
  return at::embedding(weight, ids);
}

RmsNormLayer::RmsNormLayer(int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", at::ones({dim}, options()));
}

at::Tensor RmsNormLayer::forward(const at::Tensor& x) const {
  const at::Tensor wide = widened(x); // squares of float16 overflow early
  const at::Tensor scale =
      (wide.square().mean(-1, /*keepdim=*/true) + eps_).rsqrt();
  return (wide * scale).to(x.scalar_type()) * weight;
}

LayerNormLayer::LayerNormLayer(int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", at::ones({dim}, options()));
  bias = register_parameter("bias", at::zeros({dim}, options()));
}

at::Tensor LayerNormLayer::forward(const at::Tensor& x) const {
  return at::layer_norm(x, weight.sizes(), weight, bias, eps_);
}

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(
      widened(logits).reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

} // namespace tessera
