// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/progress.h>
#include <tessera/cli/table.h>

namespace tessera::cli {
namespace {

constexpr size_t kRecent = 20;

} // namespace

Progress::Progress(std::ostream& out, int64_t steps, int64_t every, bool live)
    : out_(out), steps_(steps), every_(every), live_(live) {}

void Progress::add(
    const StepReport& report, std::optional<double> validation_loss) {
  recent_.push_back(report);
  if (recent_.size() > kRecent) {
    recent_.pop_front();
  }
  if (validation_loss) {
    validation_loss_ = validation_loss;
  }
  if (live_) {
    out_ << '\r' << line(report) << "\x1b[K"
         << std::flush; // the last part clears what a longer line left behind
  } else if (
      report.step % every_ == 0 || report.step == 1 || report.step == steps_) {
    out_ << line(report) << '\n' << std::flush;
  }
}

void Progress::finish() {
  if (live_ && !recent_.empty()) {
    out_ << '\n' << std::flush;
  }
}

double Progress::recent_seconds() const {
  double seconds = 0;
  for (const StepReport& report : recent_) {
    seconds += report.seconds.total;
  }
  return seconds;
}

double Progress::tokens_per_s() const {
  double tokens = 0;
  for (const StepReport& report : recent_) {
    tokens += static_cast<double>(report.tokens);
  }
  return recent_.empty() ? 0 : tokens / recent_seconds();
}

double Progress::communication_share() const {
  double communication = 0;
  for (const StepReport& report : recent_) {
    communication += report.seconds.communication;
  }
  return recent_.empty() ? 0 : communication / recent_seconds();
}

std::string Progress::line(const StepReport& report) const {
  const double left = static_cast<double>(steps_ - report.step) *
      recent_seconds() / static_cast<double>(recent_.size());
  return fmt::format(
      "step {:>{}}/{}  loss {:.4f}  val {}  {} tokens/s  comm {:.1f} %  ETA {}",
      report.step,
      std::to_string(steps_).size(),
      steps_,
      report.loss,
      validation_loss_ ? fmt::format("{:.4f}", *validation_loss_) : "-",
      with_commas(tokens_per_s()),
      100 * communication_share(),
      clock_text(left));
}

} // namespace tessera::cli
