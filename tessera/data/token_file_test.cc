// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/data/test_file.h>
#include <tessera/data/token_file.h>

namespace tessera {
namespace {

std::vector<int64_t> read(const TokenFile& file, int64_t offset, size_t count) {
  std::vector<int64_t> out(count);
  file.read(offset, out);
  return out;
}

template <typename Error>
std::string error_of(const std::string& path) {
  try {
    const TokenFile file(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "no such error";
}

TEST(TokenFile, ReadsBytesOfAText) {
  const TestFile text(std::string("a\0\xff z", 5));
  const TokenFile file(text.path());
  EXPECT_EQ(file.size(), 5);
  EXPECT_EQ(file.vocab_size(), 256);
  EXPECT_EQ(read(file, 0, 5), (std::vector<int64_t>{97, 0, 255, 32, 122}));
  EXPECT_EQ(read(file, 3, 2), (std::vector<int64_t>{32, 122}));
  EXPECT_EQ(read(file, 5, 0), (std::vector<int64_t>{}));
}

TEST(TokenFile, ReadsLittleEndianPairsOfABin) {
  const TestFile bin(std::string("\x01\x00\xff\xff\x00\x80", 6), ".bin");
  const TokenFile file(bin.path());
  EXPECT_EQ(file.size(), 3);
  EXPECT_EQ(file.vocab_size(), 65536);
  EXPECT_EQ(read(file, 0, 3), (std::vector<int64_t>{1, 65535, 32768}));
}

TEST(TokenFile, RefusesRangesOutside) {
  const TestFile text("abc");
  const TokenFile file(text.path());
  EXPECT_THROW(read(file, 2, 2), UsageError);
  EXPECT_THROW(read(file, -1, 1), UsageError);
  EXPECT_THROW(read(file, 4, 0), UsageError);
  EXPECT_THROW(read(file, std::numeric_limits<int64_t>::max(), 1), UsageError);
}

TEST(TokenFile, SaysWhatIsWrongWithAFile) {
  EXPECT_THAT(
      error_of<IoError>("/no/such/file.txt"),
      testing::HasSubstr("/no/such/file.txt"));
  EXPECT_THAT(
      error_of<UsageError>("/"), testing::HasSubstr("not an ordinary file"));
  const TestFile empty("");
  EXPECT_THAT(error_of<UsageError>(empty.path()), testing::HasSubstr("empty"));
  const TestFile odd("abc", ".bin");
  EXPECT_THAT(
      error_of<UsageError>(odd.path()),
      testing::HasSubstr("expected an even number"));
}

} // namespace
} // namespace tessera
