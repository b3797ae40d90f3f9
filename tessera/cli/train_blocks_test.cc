// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/cli/train_blocks.h>
#include <tessera/cli/train_options.h>
#include <tessera/data/test_file.h>

#include <sstream>

namespace tessera::cli {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::string answers_to(const std::string& requests) {
  static const TestFile text(std::string(20000, 'x'));
  TrainOptions options;
  options.data = text.path();
  options.model = "tiny";
  options.batch = 2;
  options.sequence = 16;
  std::istringstream in(requests);
  std::ostringstream out;
  train_in_blocks(make_plan(options, std::nullopt), in, out);
  return out.str();
}

TEST(TrainBlocks, RunsAsManyStepsAsEachLineSays) {
  std::istringstream lines(answers_to("1\n40\n"));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(parse_ready_line(line, "us"), 31904);
  ASSERT_TRUE(std::getline(lines, line));
  const BlockReport first = parse_block_line(line, "us");
  ASSERT_TRUE(std::getline(lines, line));
  const BlockReport second = parse_block_line(line, "us");
  EXPECT_FALSE(std::getline(lines, line));
  EXPECT_LT(second.loss, first.loss - 0.5); // 40 steps of learning
  EXPECT_GT(second.seconds, 0);
  EXPECT_GT(second.optimizer, 0);
  EXPECT_LE(
      second.forward_backward + second.communication + second.optimizer,
      second.seconds);
  EXPECT_GT(second.peak_mib, 1);
}

TEST(TrainBlocks, RefusesWhatIsNoNumberOfSteps) {
  for (const char* request : {"0\n", "many\n", "\n", "2 steps\n"}) {
    EXPECT_THAT(
        [&] { answers_to(request); },
        ThrowsMessage<UsageError>(HasSubstr("a number of steps")))
        << request;
  }
}

TEST(TrainBlocks, TakesALineApartAgain) {
  const BlockReport report{
      .seconds = 6,
      .forward_backward = 1,
      .communication = 2,
      .optimizer = 3,
      .hidden = 4,
      .loss = 5,
      .peak_mib = 7};
  const BlockReport again = parse_block_line(block_line(report), "us");
  EXPECT_EQ(again.seconds, 6);
  EXPECT_EQ(again.forward_backward, 1);
  EXPECT_EQ(again.communication, 2);
  EXPECT_EQ(again.optimizer, 3);
  EXPECT_EQ(again.hidden, 4);
  EXPECT_EQ(again.loss, 5);
  EXPECT_EQ(again.peak_mib, 7);
  for (const char* line : {"", "{}", "{\"seconds\": \"1\"}"}) {
    EXPECT_THAT(
        [&] { parse_block_line(line, "peer"); },
        ThrowsMessage<IoError>(HasSubstr("peer")));
  }
}

} // namespace
} // namespace tessera::cli
