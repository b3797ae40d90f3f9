// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/mesh/chunk.h>

#include <limits>

namespace tessera {
namespace {

using Sizes = std::vector<int64_t>;

TEST(Chunk, CutsByCeilAndLeavesLastPartsShortOrEmpty) {
  EXPECT_EQ(chunk_sizes(10, 1, 4), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(chunk_sizes(5, 1, 4), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(chunk_sizes(10, 1, 8), (Sizes{2, 2, 2, 2, 2, 0, 0, 0}));
  EXPECT_EQ(chunk_sizes(1001, 1, 2), (Sizes{501, 500}));
  EXPECT_EQ(chunk_sizes(1, 1, 3), (Sizes{1, 0, 0}));
  EXPECT_EQ(chunk_sizes(0, 1, 3), (Sizes{0, 0, 0}));
  EXPECT_EQ(chunk_sizes(7, 1, 1), (Sizes{7}));
}

TEST(Chunk, PutsBoundariesOnMultiplesOfTheUnit) {
  EXPECT_EQ(chunk_sizes(10, 2, 2), (Sizes{6, 4}));
  EXPECT_EQ(chunk_sizes(10, 4, 2), (Sizes{8, 2}));
  EXPECT_EQ(chunk_sizes(10, 16, 2), (Sizes{10, 0}));
  EXPECT_EQ(chunk_sizes(1536, 256, 4), (Sizes{512, 512, 512, 0}));
}

TEST(Chunk, TilesTheExtentForAllSmallCases) {
  for (int64_t extent = 0; extent <= 24; ++extent) {
    for (int64_t unit = 1; unit <= 7; ++unit) {
      for (int64_t parts = 1; parts <= 9; ++parts) {
        int64_t end = 0;
        int64_t first = chunk(extent, unit, parts, 0).size;
        for (int64_t i = 0; i < parts; ++i) {
          const Chunk part = chunk(extent, unit, parts, i);
          ASSERT_EQ(part.offset, end);
          ASSERT_GE(part.size, 0);
          ASSERT_LE(part.size, first);
          ASSERT_TRUE(part.offset % unit == 0 || part.size == 0);
          end += part.size;
        }
        ASSERT_EQ(end, extent)
            << extent << " unit " << unit << " over " << parts;
      }
    }
  }
}

TEST(Chunk, StandsExtentsNearTheLargestInteger) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (int64_t unit : {int64_t{1}, int64_t{1000}, kHuge - 1, kHuge}) {
    for (int64_t parts : {1, 2, 3, 1000}) {
      int64_t end = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const Chunk part = chunk(kHuge, unit, parts, i);
        ASSERT_EQ(part.offset, end) << unit << " " << parts << " " << i;
        end += part.size;
      }
      ASSERT_EQ(end, kHuge) << unit << " " << parts;
    }
  }
}

} // namespace
} // namespace tessera
