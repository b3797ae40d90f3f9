// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/cli/compare.h>
#include <tessera/cli/local_ranks.h>
#include <tessera/cli/memory_use.h>
#include <tessera/cli/train.h>
#include <tessera/cli/train_blocks.h>
#include <tessera/cli/train_command.h>
#include <tessera/cli/train_options.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

namespace tessera::cli {
namespace {

// What cannot be opened or made sense of before the work begins was asked for
// wrongly, whatever the error's type.
TrainPlan plan_or_usage_error(const TrainOptions& options) {
  try {
    return make_plan(options, launched_world_size());
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

int run_train(const TrainOptions& options) {
  const TrainPlan plan = plan_or_usage_error(options);
  if (!launched_world_size() && plan.ranks > 1) {
    return run_self_on_ranks(plan.ranks);
  }
  keep_freed_memory();
  if (options.blocks) {
    train_in_blocks(plan, std::cin, std::cout);
    return 0;
  }
  if (options.compare) {
    compare_modes(plan);
    return 0;
  }
  return train(plan);
}

} // namespace

void declare_train_command(CLI::App& app, int& exit_code) {
  CLI::App* const command =
      app.add_subcommand("train", "Train a Llama on a text");
  const auto options = std::make_shared<TrainOptions>();
  declare_train_options(*command, *options);
  command->callback([options, &exit_code] { exit_code = run_train(*options); });
}

} // namespace tessera::cli
