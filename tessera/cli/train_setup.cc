// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <tessera/cli/table.h>
#include <tessera/cli/train_setup.h>

namespace tessera::cli {

TrainSetup enter_world(const TrainPlan& plan) {
  TrainSetup setup;
  setup.world = init({.backend = plan.options.backend});
  setup.mesh = make_mesh(setup.world, plan.axes);
  return setup;
}

std::string headline(const TrainPlan& plan, const TrainSetup& setup) {
  const auto tokens = static_cast<double>(plan.file->size());
  const auto parameters =
      static_cast<double>(plan.trainer.model.parameter_count());
  return fmt::format(
      "{}: {} parameters; {}: {} tokens; {} over {}; {} rows of {} "
      "tokens per rank\n",
      plan.options.model,
      with_commas(parameters),
      plan.options.data,
      with_commas(tokens),
      setup.mesh.str(),
      setup.world.group().backend_name(),
      plan.options.batch,
      plan.options.sequence);
}

double max_over_ranks(const World& world, double value) {
  const at::Tensor largest = at::full({1}, value, at::kFloat);
  world.group().all_reduce(largest, ReduceOp::kMax)->wait();
  return largest.item<double>();
}

} // namespace tessera::cli
