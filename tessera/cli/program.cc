// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_command.h>
#include <tessera/cli/comm_command.h>
#include <tessera/cli/program.h>
#include <tessera/cli/run_command.h>
#include <tessera/cli/train_command.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {
namespace {

constexpr int kFailed = 1;
constexpr int kAskedWrongly = 2;

// How many arguments stand before the "--" of `tessera run`; CLI11 would take
// what follows for arguments of ours.
int arguments_before_marker(int argc, const char* const* argv) {
  const bool runs = argc > 1 && std::string_view(argv[1]) == "run";
  const char* const* const marker =
      std::find(argv, argv + argc, std::string_view("--"));
  return runs ? static_cast<int>(marker - argv) : argc;
}

// The command that was asked for as far as it was understood, such as
// "tessera bench dispatch".
std::string command_of(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return app.get_name() +
      (commands.empty() ? "" : " " + command_of(*commands.front()));
}

// What stands on the command line that nothing asked for; it is the mistake to
// tell of even where something is missing too.
std::vector<std::string> unknown_arguments(const CLI::App& app) {
  std::vector<std::string> unknown;
  if (!app.get_prefix_command()) {
    unknown = app.remaining();
  }
  for (const CLI::App* command : app.get_subcommands()) {
    for (const std::string& argument : unknown_arguments(*command)) {
      unknown.push_back(argument);
    }
  }
  return unknown;
}

std::string failure_text(const CLI::App* app, const CLI::Error& error) {
  const std::vector<std::string> unknown = unknown_arguments(*app);
  const std::string what = unknown.empty()
      ? error.what()
      : fmt::format("unknown argument {}", fmt::join(unknown, " "));
  return fmt::format("tessera: {}; see {} --help\n", what, command_of(*app));
}

int parse_and_run(int argc, const char* const* argv) {
  CLI::App app("Distributed training for C++ on libtorch.", "tessera");
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.require_subcommand(0, 1);
  app.failure_message(failure_text);
  int exit_code = 0;
  const int own = arguments_before_marker(argc, argv);
  declare_train_command(app, exit_code);
  declare_run_command(app, {argv + own, argv + argc}, exit_code);
  declare_bench_command(app, exit_code);
  declare_comm_command(app, exit_code);
  try {
    app.parse(own, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kAskedWrongly;
  }
  if (app.get_subcommands().empty()) {
    std::cout << app.help();
  }
  return exit_code;
}

} // namespace

int run_program(int argc, const char* const* argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const UsageError& error) {
    std::cerr << "tessera: " << error.what() << '\n';
    return kAskedWrongly;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << '\n';
    return kFailed;
  }
}

} // namespace tessera::cli
