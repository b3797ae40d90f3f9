// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// The sizes of a Llama, under the names of Hugging Face's config.json.
struct LlamaConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0; // divides num_attention_heads
  int64_t head_dim = 0; // even
  int64_t max_position_embeddings = 2048; // longest sequence, in tokens
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000;
  double initializer_range = 0.02; // standard deviation of fresh weights
  bool tie_word_embeddings = false;

  int64_t parameter_count() const; // elements; tied weights count once
  std::string to_json() const;

  // Checks that a model can be built from the sizes. `source` names the config
  // in errors. Throws UsageError.
  void check(std::string_view source) const;
};

// Reads the text of a config.json. Fields that are absent get Hugging Face's
// defaults where it has any (num_key_value_heads, head_dim,
// max_position_embeddings, rms_norm_eps, rope_theta, initializer_range,
// tie_word_embeddings); fields that do not touch the model's sizes are passed
// over. Settings that would make another model (biases, rope scaling, another
// activation) are refused. Throws UsageError.
LlamaConfig llama_config_from_json(
    std::string_view text, std::string_view source);

// The presets built in: "tiny" (tests), "llama-3m", "llama-19m", ...
std::vector<std::string> llama_presets();

// A preset by name, else a JSON file by path. Throws UsageError that lists the
// presets when it is neither.
LlamaConfig load_llama_config(const std::string& preset_or_path);

} // namespace tessera
