// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/memory_use.h>

#include <vector>

namespace tessera::cli {
namespace {

TEST(MemoryUse, ThePeakRemembersMemoryGivenBackUntilItIsReset) {
  if (!reset_peak_resident()) {
    GTEST_SKIP() << "the system does not let the peak be reset";
  }
  const double before = peak_resident_mib();
  {
    const std::vector<char> block(size_t{64} << 20, 'x');
    EXPECT_GE(resident_mib(), before + 60) << block[1000];
  }
  EXPECT_GE(peak_resident_mib(), before + 60);
  ASSERT_TRUE(reset_peak_resident());
  EXPECT_LT(peak_resident_mib(), before + 30);
}

} // namespace
} // namespace tessera::cli
