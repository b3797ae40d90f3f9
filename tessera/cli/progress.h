// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/models/step_report.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <ostream>
#include <string>

namespace tessera::cli {

// Tells how a training run goes: on a terminal one line that is written over,
// else a line every few steps.
class Progress {
 public:
  // `every`: steps between plain lines.
  Progress(std::ostream& out, int64_t steps, int64_t every, bool live);

  void add(const StepReport& report, std::optional<double> validation_loss);
  void finish(); // ends the live line

  double tokens_per_s() const; // over the last steps
  double communication_share() const; // of their time, 0 to 1

 private:
  std::string line(const StepReport& report) const;
  double recent_seconds() const;

  std::ostream& out_;
  int64_t steps_;
  int64_t every_;
  bool live_;
  std::optional<double> validation_loss_;
  std::deque<StepReport> recent_; // at most kRecent
};

} // namespace tessera::cli
