// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/memory_use.h>
#include <tessera/cli/train_blocks.h>
#include <tessera/cli/train_setup.h>
#include <tessera/models/trainer.h>

#include <charconv>
#include <chrono>
#include <istream>
#include <nlohmann/json.hpp>
#include <ostream>

namespace tessera::cli {
namespace {

int64_t steps_of(const std::string& line) {
  int64_t steps = 0;
  const auto [end, error] =
      std::from_chars(line.data(), line.data() + line.size(), steps);
  if (error != std::errc() || end != line.data() + line.size() || steps < 1) {
    throw UsageError(fmt::format(
        "train --blocks: read '{}', expected a number of steps on each line",
        line));
  }
  return steps;
}

BlockReport run_block(const World& world, Trainer& trainer, int64_t steps) {
  BlockReport block;
  world.group().barrier()->wait();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; ++i) {
    const StepReport step = trainer.step();
    block.forward_backward += step.seconds.forward_backward;
    block.communication += step.seconds.communication;
    block.optimizer += step.seconds.optimizer;
    block.hidden += step.seconds.hidden;
    block.loss = step.loss;
  }
  block.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  block.peak_mib = peak_resident_mib();
  return block;
}

// `read` takes what it needs out of the object on a line.
template <typename Read>
auto parse(const std::string& line, const std::string& source, Read&& read) {
  try {
    return read(nlohmann::json::parse(line));
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format(
        "bench train: {} wrote '{}' ({}); expected what docs/performance.md "
        "says of peers",
        source,
        line,
        error.what()));
  }
}

} // namespace

std::string ready_line(int64_t parameters) {
  return nlohmann::json{{"parameters", parameters}}.dump() + '\n';
}

std::string block_line(const BlockReport& report) {
  const nlohmann::ordered_json line = {
      {"seconds", report.seconds},
      {"forward_backward", report.forward_backward},
      {"communication", report.communication},
      {"optimizer", report.optimizer},
      {"hidden", report.hidden},
      {"loss", report.loss},
      {"peak_mib", report.peak_mib}};
  return line.dump() + '\n';
}

int64_t parse_ready_line(const std::string& line, const std::string& source) {
  return parse(line, source, [](const nlohmann::json& object) {
    return object.at("parameters").get<int64_t>();
  });
}

BlockReport parse_block_line(
    const std::string& line, const std::string& source) {
  return parse(line, source, [](const nlohmann::json& object) {
    const auto number = [&](const char* name) {
      return object.at(name).get<double>();
    };
    return BlockReport{
        .seconds = number("seconds"),
        .forward_backward = number("forward_backward"),
        .communication = number("communication"),
        .optimizer = number("optimizer"),
        .hidden = number("hidden"),
        .loss = number("loss"),
        .peak_mib = number("peak_mib")};
  });
}

void train_in_blocks(
    const TrainPlan& plan, std::istream& requests, std::ostream& answers) {
  const TrainSetup setup = enter_world(plan);
  Trainer trainer(setup.mesh, plan.trainer, plan.file);
  answers << ready_line(plan.trainer.model.parameter_count()) << std::flush;
  for (std::string line; std::getline(requests, line);) {
    answers << block_line(run_block(setup.world, trainer, steps_of(line)))
            << std::flush;
  }
}

} // namespace tessera::cli
