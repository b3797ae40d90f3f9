// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/models/layers.h>
#include <tessera/models/llama.h>

#include <vector>

namespace tessera {
namespace {

LinearLayer::Options linear_options(const LlamaConfig& config) {
  return {.std = config.initializer_range, .bias = false};
}

// The rotations of every place of a sequence: cosines [sequence, 1, head_dim],
// and sines of the same shape, negative in the first half.
struct Rotations {
  at::Tensor cosines;
  at::Tensor sines;
};

// Rotary embeddings (Su et al. 2021, arXiv 2104.09864) with Hugging Face's
// pairing: element i of a head turns with element i + head_dim / 2 by the angle
// place * theta^(-2 i / head_dim).
class RotaryTables : public torch::nn::Module {
 public:
  explicit RotaryTables(const LlamaConfig& config) {
    const int64_t half = config.head_dim / 2;
    const at::Tensor exponents =
        at::arange(half, at::kFloat) / static_cast<double>(half);
    const at::Tensor places =
        at::arange(config.max_position_embeddings, at::kFloat);
    const at::Tensor angles =
        at::outer(places, at::pow(config.rope_theta, exponents).reciprocal());
    const at::Tensor sines = angles.sin();
    const at::TensorOptions dtype(c10::get_default_dtype());
    cosines_ = register_buffer(
        "cosines", at::cat({angles, angles}, 1).cos().unsqueeze(1).to(dtype));
    sines_ = register_buffer(
        "sines", at::cat({-sines, sines}, 1).unsqueeze(1).to(dtype));
  }

  Rotations first(int64_t places) const {
    return {cosines_.narrow(0, 0, places), sines_.narrow(0, 0, places)};
  }

 private:
  at::Tensor cosines_; // [max_position_embeddings, 1, head_dim]
  at::Tensor sines_;
};

// x [batch, sequence, heads, head_dim].
at::Tensor rotate(const at::Tensor& x, const Rotations& rotations) {
  const std::vector<at::Tensor> halves = x.split(x.size(-1) / 2, -1);
  const at::Tensor swapped = at::cat({halves[1], halves[0]}, -1);
  return at::addcmul(x * rotations.cosines, swapped, rotations.sines);
}

// Repeats every key or value head for the query heads that share it: [batch,
// sequence, kv_heads, head_dim] -> [.., kv_heads * n, ..].
at::Tensor repeat_heads(const at::Tensor& x, int64_t n) {
  if (n == 1) {
    return x;
  }
  return x.unsqueeze(3)
      .expand({-1, -1, -1, n, -1})
      .reshape({x.size(0), x.size(1), -1, x.size(3)});
}

class Attention : public torch::nn::Module {
 public:
  explicit Attention(const LlamaConfig& config)
      : head_dim_(config.head_dim),
        queries_per_key_(
            config.num_attention_heads / config.num_key_value_heads) {
    const int64_t hidden = config.hidden_size;
    const int64_t width = config.num_attention_heads * head_dim_;
    const int64_t kv_width = config.num_key_value_heads * head_dim_;
    q_proj_ = register_module(
        "q_proj",
        std::make_shared<LinearLayer>(hidden, width, linear_options(config)));
    k_proj_ = register_module(
        "k_proj",
        std::make_shared<LinearLayer>(
            hidden, kv_width, linear_options(config)));
    v_proj_ = register_module(
        "v_proj",
        std::make_shared<LinearLayer>(
            hidden, kv_width, linear_options(config)));
    o_proj_ = register_module(
        "o_proj",
        std::make_shared<LinearLayer>(width, hidden, linear_options(config)));
  }

  at::Tensor forward(const at::Tensor& x, const Rotations& rotations) const {
    const at::Tensor q = rotate(heads(q_proj_->forward(x)), rotations);
    const at::Tensor k = repeat_heads(
        rotate(heads(k_proj_->forward(x)), rotations), queries_per_key_);
    const at::Tensor v =
        repeat_heads(heads(v_proj_->forward(x)), queries_per_key_);
    const at::Tensor mixed = at::scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        /*attn_mask=*/{},
        /*dropout_p=*/0,
        /*is_causal=*/true);
    return o_proj_->forward(
        mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
  }

 private:
  at::Tensor heads(const at::Tensor& x) const {
    return x.view({x.size(0), x.size(1), -1, head_dim_});
  }

  int64_t head_dim_;
  int64_t queries_per_key_;
  std::shared_ptr<LinearLayer> q_proj_, k_proj_, v_proj_, o_proj_;
};

// SwiGLU (Shazeer 2020, arXiv 2002.05202).
class SwiGlu : public torch::nn::Module {
 public:
  explicit SwiGlu(const LlamaConfig& config) {
    const int64_t hidden = config.hidden_size;
    const int64_t inner = config.intermediate_size;
    gate_proj_ = register_module(
        "gate_proj",
        std::make_shared<LinearLayer>(hidden, inner, linear_options(config)));
    up_proj_ = register_module(
        "up_proj",
        std::make_shared<LinearLayer>(hidden, inner, linear_options(config)));
    down_proj_ = register_module(
        "down_proj",
        std::make_shared<LinearLayer>(inner, hidden, linear_options(config)));
  }

  at::Tensor forward(const at::Tensor& x) const {
    return down_proj_->forward(
        at::silu(gate_proj_->forward(x)) * up_proj_->forward(x));
  }

 private:
  std::shared_ptr<LinearLayer> gate_proj_, up_proj_, down_proj_;
};

class DecoderLayer : public torch::nn::Module {
 public:
  explicit DecoderLayer(const LlamaConfig& config) {
    const auto norm = [&] {
      return std::make_shared<RmsNormLayer>(
          config.hidden_size, config.rms_norm_eps);
    };
    self_attn_ =
        register_module("self_attn", std::make_shared<Attention>(config));
    mlp_ = register_module("mlp", std::make_shared<SwiGlu>(config));
    input_layernorm_ = register_module("input_layernorm", norm());
    post_attention_layernorm_ =
        register_module("post_attention_layernorm", norm());
  }

  at::Tensor forward(const at::Tensor& x, const Rotations& rotations) const {
    const at::Tensor attended =
        x + self_attn_->forward(input_layernorm_->forward(x), rotations);
    return attended +
        mlp_->forward(post_attention_layernorm_->forward(attended));
  }

 private:
  std::shared_ptr<Attention> self_attn_;
  std::shared_ptr<SwiGlu> mlp_;
  std::shared_ptr<RmsNormLayer> input_layernorm_, post_attention_layernorm_;
};

} // namespace

// Everything but the head: what Hugging Face registers as "model".
struct Llama::Decoder : torch::nn::Module {
  explicit Decoder(const LlamaConfig& config) {
    embed_tokens = register_module(
        "embed_tokens",
        std::make_shared<EmbeddingLayer>(
            config.vocab_size, config.hidden_size, config.initializer_range));
    const auto list = register_module(
        "layers", std::make_shared<torch::nn::Module>("layers"));
    for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
      layers.push_back(list->register_module(
          std::to_string(i), std::make_shared<DecoderLayer>(config)));
    }
    norm = register_module(
        "norm",
        std::make_shared<RmsNormLayer>(
            config.hidden_size, config.rms_norm_eps));
    rotary =
        register_module("rotary_emb", std::make_shared<RotaryTables>(config));
  }

  at::Tensor forward(const at::Tensor& tokens) const {
    const Rotations rotations = rotary->first(tokens.size(1));
    at::Tensor x = embed_tokens->forward(tokens);
    for (const auto& layer : layers) {
      x = layer->forward(x, rotations);
    }
    return norm->forward(x);
  }

  std::shared_ptr<EmbeddingLayer> embed_tokens;
  std::vector<std::shared_ptr<DecoderLayer>> layers;
  std::shared_ptr<RmsNormLayer> norm;
  std::shared_ptr<RotaryTables> rotary;
};

Llama::Llama(const LlamaConfig& config) : config_(config) {
  config.check("Llama");
  decoder_ = register_module("model", std::make_shared<Decoder>(config));
  if (config.tie_word_embeddings) {
    head_ = decoder_->embed_tokens->weight;
    return;
  }
  const auto head = std::make_shared<LinearLayer>(
      config.hidden_size, config.vocab_size, linear_options(config));
  head_ = register_module("lm_head", head)->weight;
}

at::Tensor Llama::forward(const at::Tensor& tokens) const {
  if (tokens.dim() != 2 || tokens.size(1) > config_.max_position_embeddings) {
    throw UsageError(fmt::format(
        "Llama: tokens have shape [{}]; expected [batch, sequence] with at "
        "most {} places; shorten the sequence or raise "
        "max_position_embeddings",
        fmt::join(tokens.sizes(), ", "),
        config_.max_position_embeddings));
  }
  return at::linear(decoder_->forward(tokens), head_);
}

at::Tensor Llama::loss(
    const at::Tensor& tokens, const at::Tensor& targets) const {
  return token_loss(forward(tokens), targets);
}

} // namespace tessera
