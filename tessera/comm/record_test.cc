// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/run_ranks.h>
#include <nlohmann/json.hpp>

#include <vector>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;

void one_of_each(const World& world) {
  const Group& group = world.group();
  at::Tensor x = at::ones({100});
  const Counts counts{60, 40};
  const int64_t own = counts[static_cast<std::size_t>(world.rank())];
  const AskerScope scope("step");
  group.all_reduce(x, ReduceOp::kSum)->wait();
  group.reduce_scatter(x, at::empty({own}), counts, ReduceOp::kSum)->wait();
  group.all_gather(at::ones({own}), x, counts)->wait();
  group.all_to_all(x, at::empty({100}), Counts{50, 50}, Counts{50, 50})->wait();
  {
    const AskerScope inner("init");
    group.broadcast(x, 0)->wait();
  }
  const WorkPtr work = world.rank() == 0 ? group.send(x, 1) : group.recv(x, 0);
  work->wait();
  group.barrier()->wait();
}

TEST(Record, CountsKindsAndBytesOfTheFullBuffer) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        2,
        [](World world) {
          one_of_each(world);
          const Record& record = world.record();
          using enum CollectiveKind;
          for (const auto kind :
               {kAllReduce,
                kReduceScatter,
                kAllGather,
                kAllToAll,
                kBroadcast}) {
            EXPECT_EQ(record.count(kind), 1) << name_of(kind);
            EXPECT_EQ(record.bytes(kind), 400) << name_of(kind);
          }
          EXPECT_EQ(record.bytes(world.rank() == 0 ? kSend : kRecv), 400);
          EXPECT_EQ(record.count(kBarrier), 1);
          EXPECT_EQ(record.total_count(), 7);
          EXPECT_EQ(record.count(kBroadcast, "world", "init"), 1);
          EXPECT_EQ(record.count(kBroadcast, "world", "step"), 0);
          EXPECT_EQ(record.count(kAllReduce, "dp"), 0);
          EXPECT_EQ(record.count(kAllReduce, {}, "step"), 1);
        },
        {.backend = backend});
  }
}

TEST(Record, SecondsHoldIssueAndWait) {
  run_ranks(
      2,
      [](World world) {
        at::Tensor x = at::ones({1 << 20});
        const WorkPtr work = world.group().all_reduce(x, ReduceOp::kSum);
        const double issued = world.record().seconds();
        work->wait();
        EXPECT_GT(issued, 0);
        EXPECT_GT(world.record().seconds(), issued);
        EXPECT_DOUBLE_EQ(
            world.record().events().at(0).seconds, world.record().seconds());
      },
      {.backend = "gloo"});
}

TEST(Record, JsonSumsByKindAndAxis) {
  Record record;
  record.add({CollectiveKind::kAllReduce, "dp", 8, 0.5, "a"});
  record.add({CollectiveKind::kAllReduce, "dp", 4, 0.25, "b"});
  record.add({CollectiveKind::kAllGather, "tp", 16, 1, "a"});
  const auto json = nlohmann::json::parse(record.json());
  EXPECT_EQ(json["events"], 3);
  EXPECT_EQ(json["by_kind"]["all_reduce"]["dp"]["count"], 2);
  EXPECT_EQ(json["by_kind"]["all_reduce"]["dp"]["bytes"], 12);
  EXPECT_EQ(json["by_kind"]["all_reduce"]["dp"]["seconds"], 0.75);
  EXPECT_EQ(json["by_kind"]["all_gather"]["tp"]["bytes"], 16);
}

TEST(Record, ResetForgetsAndDropsLateSeconds) {
  Record record;
  const uint64_t ticket =
      record.add({CollectiveKind::kAllReduce, "dp", 8, 0.5, ""});
  record.reset();
  record.add_seconds(ticket, 1);
  EXPECT_EQ(record.total_count(), 0);
  EXPECT_EQ(record.seconds(), 0);
}

TEST(Record, SumsStayExactWhenEventsAreForgotten) {
  Record record;
  constexpr int64_t kMany = (1 << 16) + 10;
  for (int64_t i = 0; i < kMany; ++i) {
    record.add({CollectiveKind::kBarrier, "dp", 1, 0, ""});
  }
  EXPECT_EQ(record.count(CollectiveKind::kBarrier), kMany);
  EXPECT_EQ(record.bytes(CollectiveKind::kBarrier), kMany);
  EXPECT_EQ(static_cast<int64_t>(record.events().size()), 1 << 16);
}

TEST(AskerScope, InnermostWins) {
  EXPECT_STREQ(AskerScope::current(), "");
  const AskerScope outer("outer");
  {
    const AskerScope inner("inner");
    EXPECT_STREQ(AskerScope::current(), "inner");
  }
  EXPECT_STREQ(AskerScope::current(), "outer");
}

} // namespace
} // namespace tessera
