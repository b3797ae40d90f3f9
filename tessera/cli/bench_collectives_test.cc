// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_collectives.h>

namespace tessera::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

TEST(BenchCollectives, PeersPrintTheirRows) {
  const auto rows =
      peer_rows("mpi", R"([{"name": "all_reduce/1KiB", "value": 1.5}])");
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].name, "mpi/all_reduce/1KiB");
  EXPECT_EQ(rows[0].value, 1.5);
  for (const char* printed : {"", "no rows", R"([{"name": 3}])", "[1]"}) {
    EXPECT_THAT(
        [&] { peer_rows("mpi", printed); },
        ThrowsMessage<IoError>(
            AllOf(HasSubstr("--peer mpi"), HasSubstr("expected"))));
  }
}

TEST(BenchCollectives, APeerWithoutANameIsRefused) {
  BenchCollectivesOptions options;
  options.peers = {"mpirun"};
  EXPECT_THAT(
      [&] { run_bench_collectives(options); },
      ThrowsMessage<UsageError>(HasSubstr("NAME=COMMAND")));
}

TEST(BenchCollectives, ThePlotHasALinePerBackendAndAPanelPerCollective) {
  const std::vector<BenchRow> rows{
      {"shm/all_reduce/1KiB", 1, "us", "", 0},
      {"shm/all_reduce/1MiB", 20, "us", "", 0},
      {"gloo/all_reduce/1KiB", 100, "us", "", 0},
      {"gloo/broadcast/1KiB", 90, "us", "", 0},
      {"memory/triad/one core", 20, "GB/s", "", 0}};
  const std::string plot = collectives_plot(rows);
  EXPECT_THAT(
      plot,
      AllOf(
          HasSubstr(">all_reduce<"),
          HasSubstr(">broadcast<"),
          HasSubstr(">shm<"),
          HasSubstr(">gloo<"),
          Not(HasSubstr("triad"))));
}

} // namespace
} // namespace tessera::cli
