// SPDX-License-Identifier: Apache-2.0
// The parts that the models share. Each holds its parameters under the names
// that Hugging Face's and torch's modules use.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace tessera {

// x [..., in] -> x W^T (+ b) [..., out]. Weight from a normal distribution with
// standard deviation `std`, bias zero.
class LinearLayer : public torch::nn::Module {
 public:
  struct Options {
    double std = 0.02;
    bool bias = false;
  };
  LinearLayer(int64_t in, int64_t out, Options options);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight; // [out, in]
  at::Tensor bias; // [out], or undefined
};

// Token ids [...] -> rows of the table [..., dim].
class EmbeddingLayer : public torch::nn::Module {
 public:
  EmbeddingLayer(int64_t rows, int64_t dim, double std);
  at::Tensor forward(const at::Tensor& ids) const;

  at::Tensor weight; // [rows, dim]
};

// x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich
// 2019, arXiv 1910.07467). The mean is float32's for x of 16 bits.
class RmsNormLayer : public torch::nn::Module {
 public:
  RmsNormLayer(int64_t dim, double eps);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight; // [dim]

 private:
  double eps_;
};

// Layer normalisation over the last dim with weight and bias.
class LayerNormLayer : public torch::nn::Module {
 public:
  explicit LayerNormLayer(int64_t dim, double eps = 1e-5);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight; // [dim]
  at::Tensor bias; // [dim]

 private:
  double eps_;
};

// Mean cross entropy of logits [..., vocab] against target ids [...]; a scalar,
// of float32 for logits of 16 bits.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& targets);

} // namespace tessera
