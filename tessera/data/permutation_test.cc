// SPDX-License-Identifier: Apache-2.0
#include <tessera/data/permutation.h>

#include <algorithm>
#include <numeric>

namespace tessera {
namespace {

std::vector<int64_t> order(int64_t size, uint64_t seed) {
  const Permutation permutation(size, seed);
  std::vector<int64_t> values;
  for (int64_t i = 0; i < size; ++i) {
    values.push_back(permutation(i));
  }
  return values;
}

TEST(Permutation, HoldsEveryValueOnceAtAnySize) {
  for (int64_t size : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097}) {
    std::vector<int64_t> values = order(size, 7);
    std::sort(values.begin(), values.end());
    std::vector<int64_t> expected(static_cast<size_t>(size));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(values, expected) << size;
  }
}

TEST(Permutation, FollowsTheSeedAndNothingElse) {
  EXPECT_EQ(order(1000, 1), order(1000, 1));
  EXPECT_NE(order(1000, 1), order(1000, 2));
}

TEST(Permutation, LeavesFewValuesNearTheirPlace) {
  const std::vector<int64_t> values = order(10000, 3);
  int64_t moved = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    moved += std::abs(values[static_cast<size_t>(i)] - i);
  }
  EXPECT_NEAR(
      static_cast<double>(moved) / 10000,
      10000.0 / 3,
      300); // the mean distance of a random order is a third
}

TEST(Permutation, ReachesHugeSizes) {
  const Permutation permutation(int64_t{1} << 62, 5);
  EXPECT_GE(permutation((int64_t{1} << 62) - 1), 0);
  EXPECT_LT(permutation(0), int64_t{1} << 62);
}

} // namespace
} // namespace tessera
