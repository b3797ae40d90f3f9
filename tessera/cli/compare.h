// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>
#include <tessera/comm/record.h>
#include <tessera/models/step_report.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::cli {

struct TrainPlan;

// The collectives of one step, by kind.
struct KindUse {
  int64_t count = 0;
  int64_t bytes = 0;
};
using StepUse = std::map<CollectiveKind, KindUse>;

// What one synchronisation mode did.
struct ModeResult {
  std::string name; // "kImplicit"
  double tokens_per_s = 0; // of all ranks, in the best window
  StepSeconds step; // per step of that window
  StepUse use; // of the last warm-up step
  double peak_mib = 0; // of the largest rank
  double state_mib = 0; // optimizer state of the largest rank
  double early_loss = 0; // at step kEarlyStep
  double final_loss = 0;
};

constexpr int64_t kEarlyStep = 5;

// Trains in each mode from the same seed, and prints the modes side by side
// from rank 0; writes the rows to plan.options.json if set. After a warm-up the
// modes take turns in short windows of steps, so that noise meets all alike;
// each is judged by its best window. Collective over the world. Throws
// UsageError for fewer steps than the warm-up and one window need.
void compare_modes(const TrainPlan& plan);

// The table and the rows of results whose first is the reference.
std::string comparison_table(const std::vector<ModeResult>& results);
std::vector<BenchRow> comparison_rows(const std::vector<ModeResult>& results);

} // namespace tessera::cli
