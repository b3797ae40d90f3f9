// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>

#include <array>
#include <cstdlib>
#include <vector>

namespace tessera {
namespace {

TEST(Text, BracketsShapes) {
  EXPECT_EQ(bracketed({}), "[]");
  EXPECT_EQ(bracketed(std::vector<int64_t>{1024, 512}), "[1024,512]");
}

TEST(Text, CopyIsCutAndTerminated) {
  std::array<char, 4> buffer{};
  copy_text(buffer.data(), buffer.size(), "abcdef");
  EXPECT_STREQ(buffer.data(), "abc");
}

TEST(Environment, ReadsWholeNumbers) {
  setenv("TESSERA_TEST_NUMBER", "17", 1);
  EXPECT_EQ(environment_int("TESSERA_TEST_NUMBER"), 17);
  unsetenv("TESSERA_TEST_NUMBER");
  EXPECT_EQ(environment_int("TESSERA_TEST_NUMBER"), std::nullopt);
}

TEST(Environment, RejectsWhatIsNoNumberAndNamesTheVariable) {
  for (const char* text : {"12x", "1.5", "-", "99999999999999999999"}) {
    setenv("TESSERA_TEST_NUMBER", text, 1);
    EXPECT_THAT(
        [] { environment_int("TESSERA_TEST_NUMBER"); },
        testing::ThrowsMessage<UsageError>(
            testing::HasSubstr("TESSERA_TEST_NUMBER=")));
  }
  unsetenv("TESSERA_TEST_NUMBER");
}

} // namespace
} // namespace tessera
