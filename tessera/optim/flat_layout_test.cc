// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/optim/flat_layout.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;

TEST(FlatLayout, AlignsTensorsAndPadsToEqualParts) {
  const std::vector<int64_t> numels{5, 16, 0, 1, 40};
  const FlatLayout layout = flat_layout(numels, 3);
  EXPECT_THAT(
      layout.slots,
      ElementsAre(
          FlatRange{0, 5},
          FlatRange{16, 32},
          FlatRange{32, 32},
          FlatRange{32, 33},
          FlatRange{48, 88}));
  EXPECT_EQ(layout.size, 96);
  EXPECT_EQ(flat_layout({}, 4).size, 0);
  EXPECT_EQ(flat_layout(std::vector<int64_t>{1}, 4).size, 64);
}

TEST(FlatLayout, NestsTheCutsOfSeveralAxes) {
  const std::vector<GroupPosition> cuts{{2, 1}, {3, 0}};
  EXPECT_THAT(
      nested_ranges(96, cuts),
      ElementsAre(FlatRange{0, 96}, FlatRange{48, 96}, FlatRange{48, 64}));
  EXPECT_THAT(nested_ranges(96, {}), ElementsAre(FlatRange{0, 96}));
}

TEST(FlatLayout, CutsAListIntoRunsOfBytes) {
  const std::vector<int64_t> bytes{4, 4, 4, 20, 1, 1};
  EXPECT_THAT(runs_of_bytes(bytes, 8), ElementsAre(2, 1, 1, 2));
  EXPECT_THAT(runs_of_bytes(bytes, 1), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(runs_of_bytes(bytes, 100), ElementsAre(6));
  EXPECT_THAT(runs_of_bytes({}, 8), ElementsAre());
}

TEST(FlatLayout, IntersectionsMayBeEmpty) {
  EXPECT_EQ(intersect({0, 8}, {4, 12}), (FlatRange{4, 8}));
  EXPECT_EQ(intersect({0, 4}, {4, 12}).size(), 0);
  EXPECT_EQ(intersect({8, 9}, {0, 4}).size(), 0);
}

TEST(FlatKind, PutsTheShardingAxisFirstAndKnowsTheCopies) {
  const DeviceMesh mesh =
      describe_mesh({{"pp", 1}, {"dp", 2}, {"tp", 4}, {"cp", 2}}, 9);
  const SpecPtr spec = intern_contiguous(
      mesh,
      {Replicate(), Replicate(), Replicate(), Replicate()},
      {6},
      c10::kFloat);
  const Placements gradient{
      Partial(), Partial(), Replicate(), Partial(ReduceOp::kAvg)};
  const FlatKind kind = flat_kind(*spec, gradient, 3);
  EXPECT_THAT(
      kind.cuts,
      ElementsAre(
          FlatCutAxis{3, ReduceOp::kAvg}, FlatCutAxis{1, ReduceOp::kSum}));
  EXPECT_THAT(kind.copies, ElementsAre(2));
  EXPECT_EQ(kind.parts(), 4);
  EXPECT_TRUE(kind.is_first_copy()); // rank 9 is (0, 1, 0, 1)
  EXPECT_THAT(
      flat_kind(*spec, gradient, 2).cuts,
      ElementsAre(
          FlatCutAxis{1, ReduceOp::kSum}, FlatCutAxis{3, ReduceOp::kAvg}));
}

} // namespace
} // namespace tessera
