// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/bench_row.h>
#include <tessera/base/error.h>
#include <tessera/cli/interruption.h>
#include <tessera/cli/memory_use.h>
#include <tessera/cli/progress.h>
#include <tessera/cli/table.h>
#include <tessera/cli/terminal.h>
#include <tessera/cli/train.h>
#include <tessera/cli/train_setup.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

namespace tessera::cli {
namespace {

// A line of JSON per step. Does nothing without a path.
class StepLog {
 public:
  explicit StepLog(const std::string& path) : path_(path) {
    if (!path.empty()) {
      file_.open(path, std::ios::trunc);
    }
  }

  void add(const StepReport& report, std::optional<double> validation_loss) {
    if (path_.empty()) {
      return;
    }
    nlohmann::ordered_json line = {
        {"step", report.step},
        {"loss", report.loss},
        {"gradient_norm", report.gradient_norm},
        {"learning_rate", report.learning_rate},
        {"tokens", report.tokens},
        {"seconds",
         {{"total", report.seconds.total},
          {"forward_backward", report.seconds.forward_backward},
          {"communication", report.seconds.communication},
          {"optimizer", report.seconds.optimizer}}}};
    if (report.loss_scale != 1) {
      line["loss_scale"] = report.loss_scale;
      line["skipped"] = report.is_skipped;
    }
    if (validation_loss) {
      line["validation_loss"] = *validation_loss;
    }
    if (!(file_ << line.dump() << std::endl)) {
      throw IoError(fmt::format(
          "--log {}: writing failed at step {}; is the disk full?",
          path_,
          report.step));
    }
  }

 private:
  std::string path_;
  std::ofstream file_;
};

// Sums over a run.
struct Totals {
  StepSeconds seconds;
  int64_t tokens = 0;
  int64_t steps = 0;

  void add(const StepReport& report) {
    seconds.forward_backward += report.seconds.forward_backward;
    seconds.communication += report.seconds.communication;
    seconds.optimizer += report.seconds.optimizer;
    seconds.total += report.seconds.total;
    tokens += report.tokens;
    ++steps;
  }
};

struct Outcome {
  StepReport last;
  std::optional<double> validation_loss;
  Totals totals; // of all steps but the first
  double peak_mib = 0; // of the largest rank
  double state_mib = 0;
};

std::vector<BenchRow> rows_of(const Outcome& outcome) {
  const auto steps =
      static_cast<double>(std::max<int64_t>(outcome.totals.steps, 1));
  const auto ms = [&](double seconds) { return seconds * 1e3 / steps; };
  const StepSeconds& seconds = outcome.totals.seconds;
  std::vector<BenchRow> rows = {
      {"train/loss", outcome.last.loss, "nats", "", 0},
      {"train/tokens_per_s",
       seconds.total > 0
           ? static_cast<double>(outcome.totals.tokens) / seconds.total
           : 0,
       "tokens/s",
       "",
       0},
      {"train/step", ms(seconds.total), "ms", "", 0},
      {"train/forward_backward", ms(seconds.forward_backward), "ms", "", 0},
      {"train/communication", ms(seconds.communication), "ms", "", 0},
      {"train/optimizer", ms(seconds.optimizer), "ms", "", 0},
      {"train/peak_memory", outcome.peak_mib, "MiB", "", 0},
      {"train/optimizer_state", outcome.state_mib, "MiB", "", 0}};
  if (outcome.validation_loss) {
    rows.insert(
        rows.begin() + 1,
        {"train/validation_loss", *outcome.validation_loss, "nats", "", 0});
  }
  return rows;
}

void print_table(const std::vector<BenchRow>& rows, std::ostream& out) {
  Table table({"", "value", "unit"});
  for (const BenchRow& row : rows) {
    std::string name = row.name.substr(row.name.find('/') + 1);
    std::replace(name.begin(), name.end(), '_', ' ');
    table.add(
        {name,
         row.value >= 1000 ? with_commas(row.value)
                           : fmt::format("{:.4g}", row.value),
         row.unit});
  }
  out << '\n' << table.str();
}

// Every rank's own collectives, in a file of its own.
void write_trace(const std::string& path, const World& world) {
  if (path.empty()) {
    return;
  }
  const std::string own =
      world.rank() == 0 ? path : fmt::format("{}.rank{}", path, world.rank());
  std::ofstream file(own, std::ios::trunc);
  if (!(file << world.record().chrome_trace() << std::flush)) {
    throw IoError(
        fmt::format("--trace {}: writing failed; is the disk full?", own));
  }
}

// Says that training ends early, and what is left of it.
void tell_interrupted(const TrainOptions& options, int64_t steps) {
  std::cerr << fmt::format(
      "tessera: train: interrupted after step {} of {}; {}\n",
      steps,
      options.steps,
      options.log.empty()
          ? "nothing is kept, for there was no --log"
          : fmt::format("--log {} keeps those steps", options.log));
}

// Nothing when it was interrupted. The rank that reports decides, whatever
// signals the others get: its end ends them.
std::optional<Outcome> run_steps(
    const TrainPlan& plan, Trainer& trainer, bool reports) {
  const TrainOptions& options = plan.options;
  StepLog log(reports ? options.log : "");
  Progress progress(
      std::cout,
      options.steps,
      std::max<int64_t>(options.steps / 20, 1),
      live_output());
  const Interruption interruption;
  Outcome outcome;
  for (int64_t i = 1; i <= options.steps; ++i) {
    const StepReport report = trainer.step();
    std::optional<double> validation_loss;
    if (options.validation_fraction > 0 &&
        (i % options.validation_every == 0 || i == options.steps)) {
      validation_loss = trainer.validation_loss(options.validation_batches);
      outcome.validation_loss = validation_loss;
    }
    if (i > 1) {
      outcome.totals.add(report);
    }
    outcome.last = report;
    if (reports) {
      log.add(report, validation_loss);
      progress.add(report, validation_loss);
    }
    if (reports && interruption.came() && i < options.steps) {
      progress.finish();
      tell_interrupted(options, i);
      return std::nullopt;
    }
  }
  if (reports) {
    progress.finish();
  }
  return outcome;
}

} // namespace

int train(const TrainPlan& plan) {
  const TrainSetup setup = enter_world(plan);
  const bool reports = setup.world.rank() == 0;
  Trainer trainer(setup.mesh, plan.trainer, plan.file);
  if (reports) {
    std::cout << headline(plan, setup) << std::flush;
  }
  std::optional<Outcome> finished = run_steps(plan, trainer, reports);
  if (!finished) {
    return kInterruptedCode;
  }
  Outcome& outcome = *finished;
  outcome.peak_mib = max_over_ranks(setup.world, peak_resident_mib());
  outcome.state_mib = max_over_ranks(
      setup.world, static_cast<double>(trainer.state_bytes()) / 0x1p20);
  write_trace(plan.options.trace, setup.world);
  if (!reports) {
    return 0;
  }
  const std::vector<BenchRow> rows = rows_of(outcome);
  print_table(rows, std::cout);
  if (!plan.options.json.empty()) {
    write_json(rows, plan.options.json);
  }
  return 0;
}

} // namespace tessera::cli
