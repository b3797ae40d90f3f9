// SPDX-License-Identifier: Apache-2.0
#include <tessera/models/schedule.h>

namespace tessera {
namespace {

TEST(Schedule, RisesLinearlyThenFallsByACosine) {
  const Schedule schedule{
      .peak = 2, .final_ratio = 0.5, .warmup = 4, .steps = 11};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 2);
  EXPECT_DOUBLE_EQ(schedule.at(4), 2);
  EXPECT_DOUBLE_EQ(schedule.at(7), 1.5);
  EXPECT_DOUBLE_EQ(schedule.at(10), 1);
  EXPECT_DOUBLE_EQ(schedule.at(1000), 1);
}

TEST(Schedule, NeedsNoWarmupAndNoSecondStep) {
  EXPECT_DOUBLE_EQ((Schedule{.peak = 3, .warmup = 0, .steps = 1}.at(0)), 3);
  EXPECT_DOUBLE_EQ(
      (Schedule{.peak = 3, .warmup = 5, .steps = 2}.at(1)), 3 * 2.0 / 5);
}

} // namespace
} // namespace tessera
