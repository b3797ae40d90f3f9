// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/local_ranks.h>
#include <tessera/comm/launch.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {
namespace {

// This process's arguments, the program by its full path.
std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> command;
  for (std::string argument; std::getline(file, argument, '\0');) {
    command.push_back(argument);
  }
  std::error_code error;
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe", error);
  if (command.empty() || error) {
    throw IoError(
        "starting ranks: /proc/self does not tell this program's command; "
        "mount /proc, or start the ranks by `tessera run`");
  }
  command.front() = program.string();
  return command;
}

} // namespace

std::optional<int64_t> launched_world_size() {
  const char* const rank = std::getenv("RANK");
  const char* const size = std::getenv("WORLD_SIZE");
  if (rank == nullptr || size == nullptr) {
    return std::nullopt;
  }
  const std::string_view text(size);
  int64_t value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    throw UsageError(fmt::format(
        "WORLD_SIZE is \"{}\"; expected the number of ranks; unset RANK and "
        "WORLD_SIZE to run alone",
        text));
  }
  return value;
}

int run_self_on_ranks(int64_t ranks) {
  return launch(
      {.command = own_command(),
       .ranks = ranks,
       .output = LaunchOutput::kRankZeroOnly});
}

} // namespace tessera::cli
