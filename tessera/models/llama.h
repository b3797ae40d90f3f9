// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/models/llama_config.h>
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

// A Llama (Touvron et al. 2023, arXiv 2302.13971): RMSNorm, rotary position
// embeddings, grouped-query causal attention, SwiGLU. Ordinary torch: it runs
// on plain tensors, and on distributed ones when `build` makes it. Parameters
// bear Hugging Face's names, such as "model.layers.0.self_attn.q_proj.weight".
// Fresh weights are normal with standard deviation initializer_range, from the
// ambient stream.
class Llama : public torch::nn::Module {
 public:
  explicit Llama(const LlamaConfig& config);

  // Token ids [batch, sequence] (int64 or int32) -> logits [batch, sequence,
  // vocab]. Throws UsageError for a sequence longer than
  // max_position_embeddings.
  at::Tensor forward(const at::Tensor& tokens) const;

  // Mean cross entropy of the prediction at each place against `targets`
  // [batch, sequence], int64; a scalar.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) const;

  const LlamaConfig& config() const {
    return config_;
  }

 private:
  struct Decoder;
  LlamaConfig config_;
  std::shared_ptr<Decoder> decoder_;
  at::Tensor head_; // [vocab, hidden]; the embedding's table when tied
};

} // namespace tessera
