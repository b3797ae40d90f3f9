// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_train.h>
#include <tessera/cli/local_ranks.h>
#include <tessera/models/llama_config.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <string_view>

namespace tessera::cli {
namespace {

// A folder that goes away with this object.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(
            std::filesystem::temp_directory_path() /
            fmt::format("tessera_bench_{}", getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  // A file with the text; its path.
  std::string write(const std::string& name, const std::string& text) const {
    std::string path = (path_ / name).string();
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    if (!(file << text << std::flush)) {
      throw IoError("bench train: " + path + " cannot be written");
    }
    return path;
  }

 private:
  std::filesystem::path path_;
};

// A text that a model learns something of in a few steps.
std::string random_words() {
  constexpr int kCount = 200000;
  constexpr std::array<std::string_view, 8> kWords = {
      "mesh ",
      "shard ",
      "rank ",
      "gather ",
      "step ",
      "loss ",
      "axis ",
      "norm "};
  std::mt19937 choice(1); // alike everywhere
  std::string text;
  for (int i = 0; i < kCount; ++i) {
    text += kWords.at(choice() % kWords.size());
  }
  return text;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

// "NAME=REST" in two; nothing without a name.
std::pair<std::string, std::string> named(const std::string& text) {
  const auto equals = text.find('=');
  return equals == std::string::npos
      ? std::pair{std::string(), text}
      : std::pair{text.substr(0, equals), text.substr(equals + 1)};
}

// The options of `tessera train` for a mode, and its name.
std::pair<std::string, std::vector<std::string>> mode_of(
    const std::string& text) {
  const std::vector<std::string> known = sync_options();
  if (std::ranges::find(known, text) != known.end()) {
    return {text, {"--sync", text}};
  }
  const auto [name, options] = named(text);
  if (name.empty()) {
    throw UsageError(fmt::format(
        "--mode: got '{}', expected one of {}, or NAME=OPTIONS of tessera "
        "train",
        text,
        fmt::join(known, ", ")));
  }
  const std::vector<std::string> words = words_of(options);
  if (std::ranges::any_of(words, [](const std::string& word) {
        return word.starts_with("--grad-accum");
      })) {
    throw UsageError(fmt::format(
        "--mode {}: got --grad-accum, which makes steps of more tokens than "
        "the others'; leave it out",
        name));
  }
  return {name, words};
}

std::vector<std::string> own_training(const std::vector<std::string>& mode) {
  std::vector<std::string> command = {
      std::filesystem::read_symlink("/proc/self/exe").string(),
      "train",
      "--blocks",
      "--steps", // as if for ever, so that the learning rate stays
      "1000000000",
      "--warmup",
      "0"};
  command.insert(command.end(), mode.begin(), mode.end());
  return command;
}

// The words that run a shell's command with further arguments.
std::vector<std::string> in_shell(const std::string& command) {
  return {"/bin/sh", "-c", command + " \"$@\"", "sh"};
}

Contestant peer_of(const std::string& text, const std::string& alone) {
  const auto [name, command] = named(text);
  if (name.empty() || command.empty()) {
    throw UsageError(
        "--peer: got '" + text +
        "', expected NAME=COMMAND, as in "
        "ddp='python3 benchmarks/peers/train_peer.py --kind ddp'");
  }
  return {
      .name = name,
      .peer = true,
      .command = in_shell(command),
      .alone = in_shell(alone.empty() ? command : alone)};
}

void check_options(const BenchTrainOptions& options) {
  if (launched_world_size()) {
    throw UsageError(
        "bench train starts its ranks itself; run it without a launcher (RANK "
        "and WORLD_SIZE are set)");
  }
  for (const std::string& model : options.models) {
    load_llama_config(parse_bench_model(model).model);
  }
}

// What every program is told, whoever wrote it.
std::vector<std::string> common_arguments(
    const BenchModel& model,
    const BenchTrainOptions& options,
    const TemporaryFolder& folder) {
  return {
      "--model",
      folder.write("model.json", load_llama_config(model.model).to_json()),
      "--data",
      options.data.empty() ? folder.write("words.txt", random_words())
                           : options.data,
      "--batch",
      std::to_string(model.batch),
      "--seq",
      std::to_string(model.sequence),
      "--lr",
      "0.001",
      "--weight-decay",
      "0.1",
      "--clip",
      "1"};
}

} // namespace

BenchModel parse_bench_model(const std::string& text) {
  BenchModel model;
  const auto colon = text.rfind(':');
  model.model = text.substr(0, colon);
  if (colon == std::string::npos) {
    return model;
  }
  const char* const last = text.data() + text.size();
  const auto [cross, bad_batch] =
      std::from_chars(text.data() + colon + 1, last, model.batch);
  const bool crossed =
      bad_batch == std::errc() && cross != last && *cross == 'x';
  const auto [end, bad_sequence] =
      std::from_chars(crossed ? cross + 1 : last, last, model.sequence);
  if (bad_sequence != std::errc() || end != last || model.batch < 1 ||
      model.sequence < 1) {
    throw UsageError(fmt::format(
        "--model: got '{}', expected NAME:ROWSxTOKENS, as in llama-19m:2x64",
        text));
  }
  return model;
}

std::vector<Contestant> contestants_of(const BenchTrainOptions& options) {
  std::vector<Contestant> all;
  for (const std::string& backend : options.backends) {
    for (const std::string& text : options.modes) {
      const auto [name, mode] = mode_of(text);
      Contestant ours{.name = fmt::format("{}/{}", backend, name)};
      ours.alone = ours.command = own_training(mode);
      ours.command.insert(ours.command.end(), {"--backend", backend});
      all.push_back(std::move(ours));
    }
  }
  for (const std::string& text : options.peers) {
    all.push_back(peer_of(text, options.peers_alone));
  }
  return all;
}

int run_bench_train(const BenchTrainOptions& options) {
  check_options(options);
  const std::vector<Contestant> contestants = contestants_of(options);
  const TemporaryFolder folder;
  std::vector<BenchRow> rows;
  for (const std::string& text : options.models) {
    const BenchModel model = parse_bench_model(text);
    const auto results = run_match(
        contestants,
        common_arguments(model, options, folder),
        model,
        options,
        std::cout);
    std::cout << '\n' << match_table(results) << '\n' << std::flush;
    const auto more = match_rows(model.model, results);
    rows.insert(rows.end(), more.begin(), more.end());
    if (!options.json.empty()) {
      write_json(rows, options.json);
    }
  }
  return 0;
}

} // namespace tessera::cli
