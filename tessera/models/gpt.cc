// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/models/gpt.h>
#include <tessera/models/layers.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

constexpr LinearLayer::Options kLinear{.std = 0.02, .bias = true};

class Block : public torch::nn::Module {
 public:
  explicit Block(const GptConfig& config)
      : heads_(config.heads), dropout_(config.dropout) {
    const int64_t width = config.hidden;
    norm_attention_ =
        register_module("ln_1", std::make_shared<LayerNormLayer>(width));
    qkv_ = register_module(
        "c_attn", std::make_shared<LinearLayer>(width, 3 * width, kLinear));
    out_ = register_module(
        "c_proj", std::make_shared<LinearLayer>(width, width, kLinear));
    norm_mlp_ =
        register_module("ln_2", std::make_shared<LayerNormLayer>(width));
    up_ = register_module(
        "c_fc", std::make_shared<LinearLayer>(width, 4 * width, kLinear));
    down_ = register_module(
        "c_down", std::make_shared<LinearLayer>(4 * width, width, kLinear));
  }

  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor attended =
        x +
        at::dropout(
            attention(norm_attention_->forward(x)), dropout_, is_training());
    const at::Tensor inner =
        at::gelu(up_->forward(norm_mlp_->forward(attended)));
    return attended +
        at::dropout(down_->forward(inner), dropout_, is_training());
  }

 private:
  at::Tensor attention(const at::Tensor& x) const {
    const std::vector<at::Tensor> qkv = qkv_->forward(x).split(x.size(2), -1);
    const auto heads = [&](const at::Tensor& part) {
      return part.view({x.size(0), x.size(1), heads_, -1}).transpose(1, 2);
    };
    const at::Tensor mixed = at::scaled_dot_product_attention(
        heads(qkv[0]),
        heads(qkv[1]),
        heads(qkv[2]),
        /*attn_mask=*/{},
        /*dropout_p=*/0,
        /*is_causal=*/true);
    return out_->forward(mixed.transpose(1, 2).reshape(x.sizes()));
  }

  int64_t heads_;
  double dropout_;
  std::shared_ptr<LayerNormLayer> norm_attention_, norm_mlp_;
  std::shared_ptr<LinearLayer> qkv_, out_, up_, down_;
};

} // namespace

struct Gpt::Parts : torch::nn::Module {
  explicit Parts(const GptConfig& config) {
    tokens = register_module(
        "wte",
        std::make_shared<EmbeddingLayer>(
            config.vocab_size, config.hidden, kLinear.std));
    positions = register_module(
        "wpe",
        std::make_shared<EmbeddingLayer>(
            config.context, config.hidden, kLinear.std));
    const auto list =
        register_module("h", std::make_shared<torch::nn::Module>("h"));
    for (int64_t i = 0; i < config.layers; ++i) {
      blocks.push_back(list->register_module(
          std::to_string(i), std::make_shared<Block>(config)));
    }
    norm = register_module(
        "ln_f", std::make_shared<LayerNormLayer>(config.hidden));
  }

  std::shared_ptr<EmbeddingLayer> tokens, positions;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<LayerNormLayer> norm;
};

Gpt::Gpt(const GptConfig& config) : config_(config) {
  if (config.heads < 1 || config.hidden % config.heads != 0) {
    throw UsageError(fmt::format(
        "Gpt: {} heads do not divide the width {}; change one",
        config.heads,
        config.hidden));
  }
  parts_ = register_module("transformer", std::make_shared<Parts>(config));
}

at::Tensor Gpt::forward(const at::Tensor& tokens) const {
  if (tokens.dim() != 2 || tokens.size(1) > config_.context) {
    throw UsageError(fmt::format(
        "Gpt: tokens have shape [{}]; expected [batch, sequence] with at most "
        "{} places",
        fmt::join(tokens.sizes(), ", "),
        config_.context));
  }
  const at::Tensor positions =
      parts_->positions->weight.narrow(0, 0, tokens.size(1));
  at::Tensor x = at::dropout(
      parts_->tokens->forward(tokens) + positions,
      config_.dropout,
      is_training());
  for (const auto& block : parts_->blocks) {
    x = block->forward(x);
  }
  return at::linear(parts_->norm->forward(x), parts_->tokens->weight);
}

at::Tensor Gpt::loss(
    const at::Tensor& tokens, const at::Tensor& targets) const {
  return token_loss(forward(tokens), targets);
}

} // namespace tessera
