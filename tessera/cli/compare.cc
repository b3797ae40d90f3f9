// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/compare.h>
#include <tessera/cli/memory_use.h>
#include <tessera/cli/sync_modes.h>
#include <tessera/cli/train_setup.h>
#include <tessera/models/trainer.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <limits>
#include <memory>

namespace tessera::cli {
namespace {

constexpr int64_t kWindow = 5; // steps
constexpr std::array<CollectiveKind, 5> kKinds = {
    CollectiveKind::kAllReduce,
    CollectiveKind::kReduceScatter,
    CollectiveKind::kAllGather,
    CollectiveKind::kAllToAll,
    CollectiveKind::kBroadcast};

// One mode in training: its trainer and what has been seen of it.
struct ModeRun {
  GradientSync sync;
  ModeResult result;
  std::unique_ptr<Trainer> trainer;
  double best_seconds = std::numeric_limits<double>::infinity(); // of a window
};

std::vector<ModeRun> contestants() {
  std::vector<ModeRun> all;
  for (const SyncMode& mode : sync_modes()) {
    all.emplace_back();
    all.back().sync = mode.sync;
    all.back().result.name = mode.name;
  }
  return all;
}

StepUse use_so_far(const Record& record) {
  StepUse use;
  for (const CollectiveKind kind : kKinds) {
    use[kind] = {record.count(kind), record.bytes(kind)};
  }
  return use;
}

StepUse difference(const StepUse& after, const StepUse& before) {
  StepUse use;
  for (const auto& [kind, total] : after) {
    const KindUse& earlier = before.at(kind);
    use[kind] = {total.count - earlier.count, total.bytes - earlier.bytes};
  }
  return use;
}

std::unique_ptr<Trainer> make_trainer(
    const TrainPlan& plan, const TrainSetup& setup, GradientSync sync) {
  TrainerOptions options = plan.trainer;
  options.sync = sync;
  return std::make_unique<Trainer>(setup.mesh, options, plan.file);
}

// Builds the trainer and takes its first steps, alone, so that its memory and
// its collectives can be told from the others'.
void warm_up(
    const TrainPlan& plan,
    const TrainSetup& setup,
    double base_mib,
    ModeRun& contestant) {
  ModeResult& result = contestant.result;
  const bool measured = reset_peak_resident();
  const double before_mib = resident_mib();
  contestant.trainer = make_trainer(plan, setup, contestant.sync);
  for (int64_t i = 1; i <= kEarlyStep; ++i) {
    const StepUse before = use_so_far(setup.world.record());
    result.early_loss = contestant.trainer->step().loss;
    result.use = difference(use_so_far(setup.world.record()), before);
  }
  const double peak_mib =
      measured ? base_mib + peak_resident_mib() - before_mib : 0;
  result.peak_mib = max_over_ranks(setup.world, peak_mib);
  result.state_mib = max_over_ranks(
      setup.world,
      static_cast<double>(contestant.trainer->state_bytes()) / 0x1p20);
}

void run_window(const World& world, ModeRun& contestant) {
  ModeResult& result = contestant.result;
  StepSeconds sum;
  world.group().barrier()->wait();
  for (int64_t i = 0; i < kWindow; ++i) {
    const StepReport report = contestant.trainer->step();
    sum.forward_backward += report.seconds.forward_backward / kWindow;
    sum.communication += report.seconds.communication / kWindow;
    sum.optimizer += report.seconds.optimizer / kWindow;
    sum.total += report.seconds.total / kWindow;
    sum.hidden += report.seconds.hidden / kWindow;
    result.final_loss = report.loss;
  }
  if (sum.total < contestant.best_seconds) {
    contestant.best_seconds = sum.total;
    result.step = sum;
    result.tokens_per_s =
        static_cast<double>(contestant.trainer->tokens_per_step()) / sum.total;
  }
}

// The order turns from round to round, so that none always follows the same
// other.
void run_windows(
    const TrainPlan& plan, const World& world, std::vector<ModeRun>& all) {
  const int64_t rounds = (plan.options.steps - kEarlyStep) / kWindow;
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      run_window(world, all[(i + static_cast<size_t>(round)) % all.size()]);
    }
    if (world.rank() == 0) {
      std::cout << fmt::format("round {}/{}:", round + 1, rounds);
      for (const ModeRun& contestant : all) {
        std::cout << fmt::format(
            "  {} loss {:.4f}",
            contestant.result.name,
            contestant.result.final_loss);
      }
      std::cout << std::endl;
    }
  }
}

} // namespace

void compare_modes(const TrainPlan& plan) {
  if (plan.options.steps < kEarlyStep + kWindow) {
    throw UsageError(fmt::format(
        "--compare --steps {}: expected at least {}, {} to warm up and windows "
        "of {}; leave --steps out",
        plan.options.steps,
        kEarlyStep + kWindow,
        kEarlyStep,
        kWindow));
  }
  const TrainSetup setup = enter_world(plan);
  if (setup.world.rank() == 0) {
    std::cout << headline(plan, setup) << std::flush;
  }
  make_trainer(plan, setup, GradientSync::kImplicit)
      ->step(); // what the first training in a process costs once is nobody's
  reset_peak_resident();
  const double base_mib = resident_mib();
  std::vector<ModeRun> all = contestants();
  for (ModeRun& contestant : all) {
    warm_up(plan, setup, base_mib, contestant);
  }
  run_windows(plan, setup.world, all);
  if (setup.world.rank() != 0) {
    return;
  }
  std::vector<ModeResult> results;
  results.reserve(all.size());
  for (const ModeRun& contestant : all) {
    results.push_back(contestant.result);
  }
  std::cout << '\n' << comparison_table(results) << std::flush;
  if (!plan.options.json.empty()) {
    write_json(comparison_rows(results), plan.options.json);
  }
}

} // namespace tessera::cli
