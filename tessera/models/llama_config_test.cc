// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/models/llama_config.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

using nlohmann::json;

json smallest() {
  return {
      {"vocab_size", 256},
      {"hidden_size", 32},
      {"intermediate_size", 48},
      {"num_hidden_layers", 2},
      {"num_attention_heads", 4}};
}

std::string error_of(const std::string& text) {
  try {
    llama_config_from_json(text, "c.json");
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

std::string error_with(const char* field, const json& value) {
  json object = smallest();
  object[field] = value;
  return error_of(object.dump());
}

TEST(LlamaConfig, FillsHuggingFacesDefaults) {
  const LlamaConfig config =
      llama_config_from_json(smallest().dump(), "c.json");
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.max_position_embeddings, 2048);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_FALSE(config.tie_word_embeddings);
}

TEST(LlamaConfig, ReadsWhatAPublishedFileHolds) {
  json object = smallest();
  object.update(
      {{"architectures", {"LlamaForCausalLM"}},
       {"model_type", "llama"},
       {"hidden_act", "silu"},
       {"attention_bias", false},
       {"bos_token_id", 1},
       {"num_key_value_heads", 2},
       {"head_dim", 10},
       {"rms_norm_eps", 1e-5},
       {"rope_scaling", nullptr},
       {"rope_theta", 500000.0},
       {"tie_word_embeddings", true},
       {"torch_dtype", "bfloat16"}});
  const LlamaConfig config = llama_config_from_json(object.dump(), "c.json");
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim, 10);
  EXPECT_EQ(config.rope_theta, 500000);
  EXPECT_TRUE(config.tie_word_embeddings);
}

TEST(LlamaConfig, ReadsRotarySettingsFromTheirOwnObject) {
  json object = smallest();
  object["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 77.0}};
  EXPECT_EQ(llama_config_from_json(object.dump(), "c.json").rope_theta, 77);
  EXPECT_THAT(
      error_with("rope_parameters", {{"rope_type", "llama3"}}),
      ::testing::HasSubstr("rope_type"));
  EXPECT_THAT(
      error_with("rope_parameters", 3),
      ::testing::HasSubstr("expected an object"));
}

TEST(LlamaConfig, ComesBackFromItsOwnJson) {
  for (const std::string& name : llama_presets()) {
    const LlamaConfig preset = load_llama_config(name);
    EXPECT_EQ(
        llama_config_from_json(preset.to_json(), name).to_json(),
        preset.to_json());
  }
}

TEST(LlamaConfig, NamesTheFieldThatIsMissing) {
  for (const char* field :
       {"vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads"}) {
    json object = smallest();
    object.erase(field);
    EXPECT_THAT(
        error_of(object.dump()),
        ::testing::AllOf(
            ::testing::HasSubstr(field), ::testing::HasSubstr("c.json")))
        << field;
  }
}

TEST(LlamaConfig, RefusesSizesOfTheWrongTypeOrRange) {
  const std::vector<json> hostile = {
      "32",
      32.5,
      -1,
      0,
      true,
      json::array(),
      json::object(),
      1e300,
      uint64_t{1} << 63U,
      int64_t{1} << 40};
  for (const json& value : hostile) {
    EXPECT_THAT(
        error_with("hidden_size", value),
        ::testing::HasSubstr("\"hidden_size\" is"))
        << value;
  }
  EXPECT_THAT(
      error_with("rms_norm_eps", "small"),
      ::testing::HasSubstr("expected a positive number"));
  EXPECT_THAT(
      error_with("rms_norm_eps", -1e-5),
      ::testing::HasSubstr("expected a positive number"));
  EXPECT_THAT(
      error_with("tie_word_embeddings", 1),
      ::testing::HasSubstr("true or false"));
}

TEST(LlamaConfig, RefusesTextThatIsNoObject) {
  for (const char* text :
       {"",
        "{",
        "[]",
        "3",
        "null",
        "{\"vocab_size\": }",
        "\xff\xfe",
        "[[[[[[[[[["}) {
    EXPECT_THAT(error_of(text), ::testing::HasSubstr("not a JSON object"))
        << text;
  }
}

TEST(LlamaConfig, RefusesHeadsThatDoNotDivide) {
  EXPECT_THAT(
      error_with("num_attention_heads", 5),
      ::testing::HasSubstr("does not divide"));
  EXPECT_THAT(
      error_with("num_key_value_heads", 3),
      ::testing::HasSubstr("must divide"));
  EXPECT_THAT(error_with("head_dim", 7), ::testing::HasSubstr("even"));
}

TEST(LlamaConfig, RefusesSettingsOfOtherModels) {
  EXPECT_THAT(
      error_with("model_type", "gpt2"),
      ::testing::HasSubstr("only setting built so far"));
  EXPECT_THAT(
      error_with("hidden_act", "gelu"), ::testing::HasSubstr("hidden_act"));
  EXPECT_THAT(
      error_with("attention_bias", true),
      ::testing::HasSubstr("attention_bias"));
  EXPECT_THAT(
      error_with("rope_scaling", {{"factor", 8.0}}),
      ::testing::HasSubstr("rope_scaling"));
}

TEST(LlamaConfig, LoadsAFileAndListsThePresetsWhenThereIsNone) {
  const auto path =
      std::filesystem::temp_directory_path() / "tessera_llama_config_test.json";
  std::ofstream(path) << smallest().dump();
  EXPECT_EQ(load_llama_config(path.string()).hidden_size, 32);
  std::filesystem::remove(path);
  for (const std::string& wrong :
       {path.string(), std::string("lama"), std::string("/")}) {
    try {
      load_llama_config(wrong);
      FAIL() << wrong;
    } catch (const UsageError& error) {
      EXPECT_THAT(
          error.what(),
          ::testing::AllOf(
              ::testing::HasSubstr(wrong), ::testing::HasSubstr("llama-19m")));
    }
  }
}

} // namespace
} // namespace tessera
