// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/cli/line_process.h>
#include <tessera/comm/launch_spawn.h>

namespace tessera::cli {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

LineProcess shell(const std::string& script) {
  return {"child", {"/bin/sh", "-c", script}, environment_with({})};
}

TEST(LineProcess, AnswersLineByLineAndEndsWithItsInput) {
  LineProcess process =
      shell("while read x; do echo noise; echo \"{$x}\"; done; echo '{end}'");
  process.write_line("1");
  EXPECT_EQ(process.read_line(), "{1}");
  process.write_line("2");
  EXPECT_EQ(process.read_line(), "{2}");
  process.close_input();
  EXPECT_EQ(process.read_line(), "{end}");
  process.await_end(std::chrono::minutes(1));
}

TEST(LineProcess, TellsHowItEnded) {
  LineProcess process = shell("exit 6");
  EXPECT_THAT(
      [&] { process.read_line(); },
      ThrowsMessage<IoError>(HasSubstr("child ended with code 6")));
  EXPECT_THROW(process.read_line(), IoError);
  LineProcess killed = shell("kill -9 $$");
  EXPECT_THAT(
      [&] { killed.read_line(); },
      ThrowsMessage<IoError>(HasSubstr("child ended with signal 9")));
  EXPECT_THAT(
      [] { LineProcess("child", {"/no/such/program"}, environment_with({})); },
      ThrowsMessage<IoError>(HasSubstr("'/no/such/program' cannot be run")));
}

TEST(LineProcess, IsKilledWithItsObjectThoughItGoesOn) {
  // The second process would keep this test waiting, were the group not killed.
  LineProcess process = shell("trap '' TERM; echo '{}'; sleep 1000; true");
  EXPECT_EQ(process.read_line(), "{}");
}

} // namespace
} // namespace tessera::cli
