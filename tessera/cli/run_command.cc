// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/number_option.h>
#include <tessera/cli/run_command.h>
#include <tessera/comm/launch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::cli {
namespace {

constexpr int64_t kMostRanks = 4096;

} // namespace

void declare_run_command(
    CLI::App& app,
    const std::vector<std::string>& after_marker,
    int& exit_code) {
  CLI::App* const command = app.add_subcommand(
      "run",
      "Start local ranks of a program: tessera run -n N [--] PROGRAM "
      "[ARGS...]");
  const auto ranks = std::make_shared<int64_t>(0);
  const auto restarts = std::make_shared<int64_t>(0);
  command->add_option("--ranks,-n", *ranks, "Number of processes")
      ->required()
      ->check(whole_number(1, kMostRanks));
  command
      ->add_option(
          "--restarts",
          *restarts,
          "How often a job that failed is started again; TESSERA_RESTART tells "
          "it the count")
      ->check(whole_number(0));
  command->prefix_command(); // what follows the first argument that is no
                             // option of ours belongs to the program
  command->callback([command, ranks, restarts, after_marker, &exit_code] {
    std::vector<std::string> program = command->remaining();
    const size_t marker = program.empty() && !after_marker.empty()
        ? 1
        : 0; // a later "--" is the program's own
    program.insert(
        program.end(),
        after_marker.begin() + static_cast<std::ptrdiff_t>(marker),
        after_marker.end());
    if (program.empty()) {
      throw CLI::RequiredError(
          "run: a program to start, as in `tessera run -n 2 ./program`");
    }
    exit_code =
        launch({.command = program, .ranks = *ranks, .restarts = *restarts});
  });
}

} // namespace tessera::cli
