// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/progress.h>

#include <sstream>

namespace tessera::cli {
namespace {

StepReport report(int64_t step, double loss) {
  StepReport r;
  r.step = step;
  r.loss = loss;
  r.tokens = 1000;
  r.seconds = {
      .forward_backward = 0.3,
      .communication = 0.125,
      .optimizer = 0.075,
      .total = 0.5};
  return r;
}

TEST(Progress, WritesALineEveryFewStepsWhenNotOnATerminal) {
  std::ostringstream out;
  Progress progress(out, 100, 10, /*live=*/false);
  for (int64_t step = 1; step <= 20; ++step) {
    progress.add(
        report(step, 3),
        step == 10 ? std::optional<double>(2.5) : std::nullopt);
  }
  progress.finish();
  EXPECT_EQ(
      out.str(),
      "step   1/100  loss 3.0000  val -  2,000 tokens/s  comm 25.0 %  ETA "
      "0:50\n"
      "step  10/100  loss 3.0000  val 2.5000  2,000 tokens/s  comm 25.0 %  ETA "
      "0:45\n"
      "step  20/100  loss 3.0000  val 2.5000  2,000 tokens/s  comm 25.0 %  ETA "
      "0:40\n");
}

TEST(Progress, WritesOverOneLineOnATerminal) {
  std::ostringstream out;
  Progress progress(out, 2, 10, /*live=*/true);
  progress.add(report(1, 3), std::nullopt);
  progress.add(report(2, 2), 2.5);
  progress.finish();
  EXPECT_EQ(
      out.str(),
      "\rstep 1/2  loss 3.0000  val -  2,000 tokens/s  comm 25.0 %  ETA "
      "0:01\x1b[K"
      "\rstep 2/2  loss 2.0000  val 2.5000  2,000 tokens/s  comm 25.0 %  ETA "
      "0:00\x1b[K\n");
}

TEST(Progress, ForgetsStepsLongPast) {
  std::ostringstream out;
  Progress progress(out, 1000, 1000, /*live=*/false);
  StepReport slow = report(1, 3);
  slow.seconds.total = 100;
  progress.add(slow, std::nullopt);
  for (int64_t step = 2; step <= 30; ++step) {
    progress.add(report(step, 3), std::nullopt);
  }
  EXPECT_DOUBLE_EQ(progress.tokens_per_s(), 2000);
  EXPECT_DOUBLE_EQ(progress.communication_share(), 0.25);
}

} // namespace
} // namespace tessera::cli
