// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/table.h>

namespace tessera::cli {
namespace {

TEST(Table, AlignsNamesLeftAndNumbersRight) {
  Table table({"", "a", "long"});
  table.add({"name", "1", "2"});
  table.add({"x", "345"});
  EXPECT_EQ(
      table.str(),
      "        a  long\n---------------\nname    1     2\nx     345\n");
}

TEST(Table, WritesThousandsAndTimes) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999.4), "999");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
  EXPECT_EQ(with_commas(-1000), "-1,000");
  EXPECT_EQ(clock_text(7), "0:07");
  EXPECT_EQ(clock_text(754.4), "12:34");
  EXPECT_EQ(clock_text(3723), "1:02:03");
}

} // namespace
} // namespace tessera::cli
