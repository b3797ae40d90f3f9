// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/compare.h>

#include <algorithm>

namespace tessera::cli {
namespace {

std::vector<ModeResult> results() {
  ModeResult slow;
  slow.name = "kImplicit";
  slow.tokens_per_s = 1000;
  slow.peak_mib = 100;
  slow.state_mib = 8;
  slow.early_loss = 5.5;
  slow.final_loss = 4;
  slow.step = {
      .forward_backward = 0.1,
      .communication = 0.08,
      .optimizer = 0.02,
      .total = 0.2};
  slow.use[CollectiveKind::kAllReduce] = {.count = 39, .bytes = 3 << 20};
  slow.use[CollectiveKind::kReduceScatter] = {};
  slow.use[CollectiveKind::kAllToAll] = {};
  ModeResult fast = slow;
  fast.name = "kReduceScatter";
  fast.tokens_per_s = 1250;
  fast.use[CollectiveKind::kAllReduce] = {.count = 1, .bytes = 4};
  fast.use[CollectiveKind::kReduceScatter] = {.count = 38, .bytes = 3 << 20};
  return {slow, fast};
}

double value_of(const std::vector<BenchRow>& rows, const std::string& name) {
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const BenchRow& r) {
        return r.name == name;
      });
  EXPECT_NE(row, rows.end()) << name;
  return row == rows.end() ? 0 : row->value;
}

TEST(Comparison, PrintsTheModesSideBySide) {
  const std::string table = comparison_table(results());
  EXPECT_THAT(table, testing::ContainsRegex("kImplicit +kReduceScatter\n"));
  EXPECT_THAT(table, testing::ContainsRegex("tokens/s +1,000 +1,250\n"));
  EXPECT_THAT(
      table, testing::ContainsRegex("ratio to kImplicit +1.000 +1.250\n"));
  EXPECT_THAT(table, testing::ContainsRegex("  communication +80.0 +80.0\n"));
  EXPECT_THAT(table, testing::ContainsRegex("all_reduce per step +39 +1\n"));
  EXPECT_THAT(
      table,
      testing::ContainsRegex("reduce_scatter, MiB per step +0.00 +3.00\n"));
  EXPECT_THAT(
      table,
      testing::ContainsRegex("peak memory of a rank, MiB +100.0 +100.0\n"));
  EXPECT_THAT(table, testing::Not(testing::HasSubstr("all_to_all")));
}

TEST(Comparison, RowsCompareWithTheFirstMode) {
  const std::vector<BenchRow> rows = comparison_rows(results());
  EXPECT_EQ(value_of(rows, "train/kReduceScatter/tokens_per_s"), 1250);
  EXPECT_EQ(value_of(rows, "train/kImplicit/all_reduce_count"), 39);
  EXPECT_EQ(value_of(rows, "train/kReduceScatter/reduce_scatter_volume"), 3);
  for (const BenchRow& row : rows) {
    const bool reference = row.name.starts_with("train/kImplicit/");
    EXPECT_EQ(row.against.empty(), reference) << row.name;
    if (row.name == "train/kReduceScatter/tokens_per_s") {
      EXPECT_EQ(row.against, "train/kImplicit/tokens_per_s");
      EXPECT_DOUBLE_EQ(row.ratio, 1.25);
    }
  }
}

} // namespace
} // namespace tessera::cli
