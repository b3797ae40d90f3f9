// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/models/llama_config.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

namespace tessera {
namespace {

using Json = nlohmann::json;

// Keeps products of three sizes inside int64.
constexpr int64_t kLargestSize = int64_t{1} << 20;

// The fields of one JSON object, read with errors that name the field and what
// it held.
class Fields {
 public:
  Fields(const Json& object, std::string_view source)
      : object_(object), source_(source) {}

  int64_t size(
      const char* name, std::optional<int64_t> fallback = std::nullopt) const {
    const Json* value = find(name);
    if (value == nullptr) {
      if (!fallback) {
        throw UsageError(fmt::format(
            "model config [{}]: field \"{}\" is missing; add it, as in Hugging "
            "Face's config.json",
            source_,
            name));
      }
      return *fallback;
    }
    const bool fits = value->is_number_unsigned() &&
        value->get<uint64_t>() <= static_cast<uint64_t>(kLargestSize);
    if (!fits || value->get<int64_t>() < 1) {
      fail(name, *value, fmt::format("an integer from 1 to {}", kLargestSize));
    }
    return value->get<int64_t>();
  }

  double positive(const char* name, double fallback) const {
    const Json* value = find(name);
    if (value == nullptr) {
      return fallback;
    }
    if (!value->is_number() || !std::isfinite(value->get<double>()) ||
        value->get<double>() <= 0) {
      fail(name, *value, "a positive number");
    }
    return value->get<double>();
  }

  bool flag(const char* name, bool fallback) const {
    const Json* value = find(name);
    if (value != nullptr && !value->is_boolean()) {
      fail(name, *value, "true or false");
    }
    return value == nullptr ? fallback : value->get<bool>();
  }

  // Refuses a field whose value is anything but `supported`.
  void only(const char* name, const Json& supported) const {
    const Json* value = find(name);
    if (value != nullptr && *value != supported) {
      fail(
          name,
          *value,
          fmt::format("{}, the only setting built so far", supported.dump()));
    }
  }

  // The field's value; null counts as absent.
  const Json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  [[noreturn]] void fail(
      const char* name, const Json& got, const std::string& expected) const {
    const std::string text =
        got.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80);
    throw UsageError(fmt::format(
        "model config [{}]: \"{}\" is {}; expected {}",
        source_,
        name,
        text,
        expected));
  }

 private:
  const Json& object_;
  std::string_view source_;
};

// Newer files keep the rotary settings in an object of their own.
double rope_theta_of(const Fields& fields, std::string_view source) {
  fields.only("rope_scaling", nullptr);
  const Json* rope = fields.find("rope_parameters");
  if (rope == nullptr) {
    return fields.positive("rope_theta", 10000);
  }
  if (!rope->is_object()) {
    fields.fail("rope_parameters", *rope, "an object");
  }
  const Fields inner(*rope, source);
  inner.only("rope_type", "default");
  return inner.positive("rope_theta", 10000);
}

LlamaConfig preset_config(
    int64_t layers,
    int64_t hidden,
    int64_t intermediate,
    int64_t heads,
    int64_t kv_heads) {
  LlamaConfig config;
  config.vocab_size = 256;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.num_hidden_layers = layers;
  config.num_attention_heads = heads;
  config.num_key_value_heads = kv_heads;
  config.head_dim = hidden / heads;
  return config;
}

struct Preset {
  const char* name;
  LlamaConfig config;
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"tiny", preset_config(2, 32, 48, 4, 2)},
      {"llama-1m", preset_config(4, 128, 352, 4, 2)},
      {"llama-3m", preset_config(4, 256, 688, 4, 4)},
      {"llama-19m", preset_config(6, 512, 1376, 8, 8)},
      {"llama-85m", preset_config(12, 768, 2048, 12, 4)},
  };
  return all;
}

} // namespace

int64_t LlamaConfig::parameter_count() const {
  const int64_t attention =
      hidden_size * head_dim * 2 * (num_attention_heads + num_key_value_heads);
  const int64_t layer =
      attention + 3 * hidden_size * intermediate_size + 2 * hidden_size;
  return num_hidden_layers * layer + hidden_size +
      vocab_size * hidden_size * (tie_word_embeddings ? 1 : 2);
}

std::string LlamaConfig::to_json() const {
  const nlohmann::ordered_json object = {
      {"model_type", "llama"},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", num_hidden_layers},
      {"num_attention_heads", num_attention_heads},
      {"num_key_value_heads", num_key_value_heads},
      {"head_dim", head_dim},
      {"max_position_embeddings", max_position_embeddings},
      {"rms_norm_eps", rms_norm_eps},
      {"rope_theta", rope_theta},
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_word_embeddings}};
  return object.dump(2);
}

void LlamaConfig::check(std::string_view source) const {
  const auto fail = [&](const std::string& what) {
    throw UsageError(fmt::format("model config [{}]: {}", source, what));
  };
  if (num_attention_heads % num_key_value_heads != 0) {
    fail(fmt::format(
        "num_key_value_heads is {}, num_attention_heads {}; the first must "
        "divide the second",
        num_key_value_heads,
        num_attention_heads));
  }
  if (head_dim % 2 != 0) {
    fail(fmt::format(
        "head_dim is {}; rotary embeddings need an even one", head_dim));
  }
}

LlamaConfig llama_config_from_json(
    std::string_view text, std::string_view source) {
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    throw UsageError(fmt::format(
        "model config [{}]: not a JSON object; expected one with Hugging "
        "Face's field names",
        source));
  }
  const Fields fields(object, source);
  fields.only("model_type", "llama");
  fields.only("hidden_act", "silu");
  fields.only("attention_bias", false);
  fields.only("mlp_bias", false);
  LlamaConfig config;
  config.vocab_size = fields.size("vocab_size");
  config.hidden_size = fields.size("hidden_size");
  config.intermediate_size = fields.size("intermediate_size");
  config.num_hidden_layers = fields.size("num_hidden_layers");
  config.num_attention_heads = fields.size("num_attention_heads");
  config.num_key_value_heads =
      fields.size("num_key_value_heads", config.num_attention_heads);
  if (fields.find("head_dim") == nullptr &&
      config.hidden_size % config.num_attention_heads != 0) {
    throw UsageError(fmt::format(
        "model config [{}]: hidden_size {} does not divide by "
        "num_attention_heads {}; change one, or give head_dim",
        source,
        config.hidden_size,
        config.num_attention_heads));
  }
  config.head_dim =
      fields.size("head_dim", config.hidden_size / config.num_attention_heads);
  config.max_position_embeddings = fields.size("max_position_embeddings", 2048);
  config.rms_norm_eps = fields.positive("rms_norm_eps", 1e-6);
  config.rope_theta = rope_theta_of(fields, source);
  config.initializer_range = fields.positive("initializer_range", 0.02);
  config.tie_word_embeddings = fields.flag("tie_word_embeddings", false);
  config.check(source);
  return config;
}

std::vector<std::string> llama_presets() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
    names.emplace_back(preset.name);
  }
  return names;
}

LlamaConfig load_llama_config(const std::string& preset_or_path) {
  for (const Preset& preset : presets()) {
    if (preset_or_path == preset.name) {
      return preset.config;
    }
  }
  std::ifstream file(preset_or_path);
  std::stringstream text;
  if (!file || !(text << file.rdbuf())) {
    throw UsageError(fmt::format(
        "--model {}: neither a preset nor a file that can be read; presets are "
        "{}",
        preset_or_path,
        fmt::join(llama_presets(), ", ")));
  }
  return llama_config_from_json(text.str(), preset_or_path);
}

} // namespace tessera
