// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

namespace tessera {

struct GptConfig {
  int64_t vocab_size = 256;
  int64_t context = 64; // longest sequence, in tokens
  int64_t layers = 2;
  int64_t heads = 4; // divides hidden
  int64_t hidden = 64;
  double dropout = 0.1; // after the embedding, each attention and each MLP
};

// A GPT (Radford et al. 2019): learned positions, LayerNorm before each block,
// GELU, biases, head tied to the embedding.
class Gpt : public torch::nn::Module {
 public:
  explicit Gpt(const GptConfig& config); // throws UsageError

  // Token ids [batch, sequence] -> logits [batch, sequence, vocab]. Dropout
  // acts in training mode. Throws UsageError for a sequence longer than the
  // context.
  at::Tensor forward(const at::Tensor& tokens) const;

  // Mean cross entropy against `targets` [batch, sequence]; a scalar.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) const;

 private:
  struct Parts;
  GptConfig config_;
  std::shared_ptr<Parts> parts_;
};

} // namespace tessera
