// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/models/llama.h>
#include <tessera/models/model_testing.h>

#include <map>
#include <set>

namespace tessera {
namespace {

LlamaConfig tiny() {
  return load_llama_config("tiny");
}

// The model once more, from its parameters by name, in the plainest
// formulation: explicit sums over heads and places, float64.
class PlainLlama {
 public:
  explicit PlainLlama(const Llama& model) : config_(model.config()) {
    for (const auto& item : model.named_parameters()) {
      weights_[item.key()] = item.value().detach().to(torch::kFloat64);
    }
  }

  torch::Tensor forward(const torch::Tensor& tokens) const {
    torch::Tensor x = at("model.embed_tokens").index({tokens});
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      x = x +
          attention(norm(x, layer + "input_layernorm"), layer + "self_attn.");
      const torch::Tensor h = norm(x, layer + "post_attention_layernorm");
      const torch::Tensor gate =
          torch::matmul(h, at(layer + "mlp.gate_proj").t());
      const torch::Tensor up = torch::matmul(h, at(layer + "mlp.up_proj").t());
      x = x +
          torch::matmul(
              gate * torch::sigmoid(gate) * up,
              at(layer + "mlp.down_proj").t());
    }
    const torch::Tensor& head =
        config_.tie_word_embeddings ? at("model.embed_tokens") : at("lm_head");
    return torch::matmul(norm(x, "model.norm"), head.t());
  }

 private:
  const torch::Tensor& at(const std::string& name) const {
    return weights_.at(name + ".weight");
  }

  torch::Tensor norm(const torch::Tensor& x, const std::string& name) const {
    return x /
        torch::sqrt(
               (x * x).sum(-1, true) / static_cast<double>(x.size(-1)) +
               config_.rms_norm_eps) *
        at(name);
  }

  // Turns element pairs (i, i + head_dim / 2) of one head [sequence, head_dim]
  // as complex numbers.
  torch::Tensor rotate(const torch::Tensor& x) const {
    const int64_t half = config_.head_dim / 2;
    torch::Tensor out = torch::empty_like(x);
    for (int64_t place = 0; place < x.size(0); ++place) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(place) *
            std::pow(config_.rope_theta,
                     -2.0 * double(i) / double(config_.head_dim));
        const double re = x[place][i].item<double>();
        const double im = x[place][i + half].item<double>();
        out[place][i] = re * std::cos(angle) - im * std::sin(angle);
        out[place][i + half] = re * std::sin(angle) + im * std::cos(angle);
      }
    }
    return out;
  }

  torch::Tensor head(
      const torch::Tensor& x, const std::string& name, int64_t index) const {
    return torch::matmul(
        x, at(name).narrow(0, index * config_.head_dim, config_.head_dim).t());
  }

  torch::Tensor attention(
      const torch::Tensor& x, const std::string& name) const {
    const int64_t group =
        config_.num_attention_heads / config_.num_key_value_heads;
    const torch::Tensor future =
        torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    std::vector<torch::Tensor> rows;
    for (int64_t b = 0; b < x.size(0); ++b) {
      std::vector<torch::Tensor> heads;
      for (int64_t h = 0; h < config_.num_attention_heads; ++h) {
        const torch::Tensor q = rotate(head(x[b], name + "q_proj", h));
        const torch::Tensor k = rotate(head(x[b], name + "k_proj", h / group));
        const torch::Tensor scores = torch::matmul(q, k.t()) /
            std::sqrt(static_cast<double>(config_.head_dim));
        const torch::Tensor weights =
            torch::softmax(scores.masked_fill(future, -INFINITY), -1);
        heads.push_back(
            torch::matmul(weights, head(x[b], name + "v_proj", h / group)));
      }
      rows.push_back(torch::cat(heads, -1));
    }
    return torch::matmul(torch::stack(rows), at(name + "o_proj").t());
  }

  LlamaConfig config_;
  std::map<std::string, torch::Tensor> weights_;
};

TEST(Llama, EqualsThePlainFormulation) {
  for (const int64_t kv_heads : {1, 2, 4}) {
    for (const bool tied : {false, true}) {
      torch::manual_seed(11);
      LlamaConfig config = tiny();
      config.num_key_value_heads = kv_heads;
      config.tie_word_embeddings = tied;
      config.initializer_range =
          0.3; // large enough that attention is far from uniform
      const Llama model(config);
      const torch::Tensor tokens = torch::randint(0, config.vocab_size, {2, 7});
      const torch::Tensor got = model.forward(tokens).to(torch::kFloat64);
      const torch::Tensor expected = PlainLlama(model).forward(tokens);
      EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-4))
          << "kv heads " << kv_heads << " tied " << tied
          << " largest difference "
          << (got - expected).abs().max().item<double>();
    }
  }
}

TEST(Llama, TakesAHeadDimOfItsOwn) {
  torch::manual_seed(12);
  LlamaConfig config = tiny();
  config.head_dim = 6;
  config.initializer_range = 0.3;
  const Llama model(config);
  const torch::Tensor tokens = torch::randint(0, config.vocab_size, {1, 5});
  EXPECT_TRUE(torch::allclose(
      model.forward(tokens).to(torch::kFloat64),
      PlainLlama(model).forward(tokens),
      1e-4,
      1e-4));
}

TEST(Llama, BearsHuggingFacesParameterNames) {
  LlamaConfig config = tiny();
  config.num_hidden_layers = 1;
  std::set<std::string> names;
  const Llama model(config);
  int64_t elements = 0;
  for (const auto& item : model.named_parameters()) {
    names.insert(item.key());
    elements += item.value().numel();
  }
  const std::string layer = "model.layers.0.";
  const std::set<std::string> expected = {
      "model.embed_tokens.weight",
      layer + "self_attn.q_proj.weight",
      layer + "self_attn.k_proj.weight",
      layer + "self_attn.v_proj.weight",
      layer + "self_attn.o_proj.weight",
      layer + "mlp.gate_proj.weight",
      layer + "mlp.up_proj.weight",
      layer + "mlp.down_proj.weight",
      layer + "input_layernorm.weight",
      layer + "post_attention_layernorm.weight",
      "model.norm.weight",
      "lm_head.weight"};
  EXPECT_EQ(names, expected);
  EXPECT_EQ(elements, config.parameter_count());
  config.tie_word_embeddings = true;
  EXPECT_EQ(Llama(config).named_parameters().size(), 11U);
}

TEST(Llama, PresetsHaveTheSizesTheyAreNamedFor) {
  EXPECT_EQ(load_llama_config("llama-3m").parameter_count(), 3295488);
  EXPECT_EQ(load_llama_config("llama-19m").parameter_count(), 19241472);
}

TEST(Llama, ALaterTokenDoesNotTouchEarlierLogits) {
  torch::manual_seed(13);
  const Llama model(tiny());
  testing::expect_causal(model);
}

TEST(Llama, EveryParameterGetsAFiniteGradient) {
  torch::manual_seed(14);
  Llama model(tiny());
  const torch::Tensor tokens = torch::randint(0, 256, {2, 9});
  model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)).backward();
  for (const auto& item : model.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(torch::isfinite(item.value().grad()).all().item<bool>())
        << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<float>(), 0) << item.key();
  }
}

TEST(Llama, LossFallsWhenOneBatchIsRepeated) {
  torch::manual_seed(15);
  Llama model(tiny());
  const testing::Losses losses = testing::learn_one_batch(model);
  EXPECT_NEAR(losses.first, std::log(256.0), 0.3);
  EXPECT_LT(losses.last, 1);
}

TEST(Llama, SaysWhenASequenceIsTooLong) {
  LlamaConfig config = tiny();
  config.max_position_embeddings = 4;
  const Llama model(config);
  EXPECT_THROW(model.forward(torch::zeros({1, 5}, torch::kLong)), UsageError);
  EXPECT_THROW(model.forward(torch::zeros({4}, torch::kLong)), UsageError);
  EXPECT_EQ(model.forward(torch::zeros({1, 4}, torch::kLong)).size(1), 4);
}

} // namespace
} // namespace tessera
