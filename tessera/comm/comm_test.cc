// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/run_ranks.h>
#include <ATen/ATen.h>

namespace tessera {
namespace {

using testing::HasSubstr;

TEST(Group, AllReduceSumsOnEveryWorldSize) {
  for (int64_t n = 1; n <= 4; ++n) {
    for (const int64_t numel : {0, 1, 7, 5000, 300001, 1000003}) {
      run_ranks(n, [n, numel](World world) {
        at::Tensor x = at::arange(numel, at::kFloat) +
            static_cast<double>(world.rank());
        world.group().all_reduce(x, ReduceOp::kSum)->wait();
        const auto offset = static_cast<double>(n * (n - 1)) / 2;
        EXPECT_TRUE(at::allclose(
            x, at::arange(numel, at::kFloat) * n + offset));
      });
    }
  }
}

TEST(Group, MismatchedShapesFailOnBothRanks) {
  run_ranks(2, [](World world) {
    at::Tensor x = at::ones({world.rank() == 0 ? 100 : 200});
    EXPECT_THAT(
        [&] { world.group().all_reduce(x, ReduceOp::kSum)->wait(); },
        testing::ThrowsMessage<PeerError>(testing::AllOf(
            HasSubstr("all_reduce"), HasSubstr("[100]"), HasSubstr("[200]"))));
  });
}

} // namespace
} // namespace tessera
