// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/bench_row.h>
#include <tessera/base/error.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

TEST(BenchRow, WritesEveryFieldAndNullWhereNothingIsCompared) {
  const auto rows = nlohmann::json::parse(to_json(
      {{"a \"b\"", 1.5, "us", "plain", 2.0},
       {"c", std::numeric_limits<double>::quiet_NaN(), "s", "", 3.0}}));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(
      rows[0],
      nlohmann::json(
          {{"name", "a \"b\""},
           {"value", 1.5},
           {"unit", "us"},
           {"against", "plain"},
           {"ratio", 2.0}}));
  EXPECT_TRUE(rows[1]["value"].is_null());
  EXPECT_TRUE(rows[1]["against"].is_null());
  EXPECT_TRUE(rows[1]["ratio"].is_null());
}

TEST(BenchRow, WritesAnEmptyListAsAnEmptyArray) {
  EXPECT_EQ(nlohmann::json::parse(to_json({})), nlohmann::json::array());
}

TEST(BenchRow, AFileThatCannotBeWrittenIsAnIoErrorThatNamesIt) {
  try {
    write_json({}, "/no/such/folder/rows.json");
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_NE(
        std::string(error.what()).find("/no/such/folder/rows.json"),
        std::string::npos);
  }
}

} // namespace
} // namespace tessera
