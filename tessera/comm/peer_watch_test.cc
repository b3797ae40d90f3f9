// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tessera/base/error.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/rank_text.h>
#include <tessera/comm/run_ranks.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

using Watches = std::vector<std::shared_ptr<PeerWatch>>;

// The watches of ranks that are threads, on the machines given.
Watches open_all(const std::vector<std::string>& machines) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::shared_ptr<PeerWatch>>> opened;
  for (std::size_t rank = 0; rank < machines.size(); ++rank) {
    opened.push_back(std::async(std::launch::async, [&, rank] {
      return PeerWatch::open(
          {.store = store,
           .rank = static_cast<int64_t>(rank),
           .size = static_cast<int64_t>(machines.size()),
           .timeout = std::chrono::seconds(20),
           .machine = machines[rank]});
    }));
  }
  Watches watches;
  for (auto& one : opened) {
    watches.push_back(one.get());
  }
  return watches;
}

const std::vector<int64_t> kAll{0, 1, 2};
constexpr CallPlace kCall{.group = 5, .seq = 12};

TEST(RankText, NamesRanksAlikeEverywhere) {
  EXPECT_EQ(rank_text(3, 3, 17, "box"), "rank 3 (pid 17, host box)");
  EXPECT_EQ(
      rank_text(1, 3, 17, "box"), "rank 1 (world rank 3, pid 17, host box)");
  EXPECT_EQ(
      last_operation_text("all_reduce", 12),
      ", last operation all_reduce seq 12");
  EXPECT_EQ(last_operation_text("", 0), "");
}

TEST(PeerWatch, AFailureIsFollowedToWhereItBegan) {
  const Watches watches = open_all({"a", "a", "a"});
  watches[2]->note(CollectiveKind::kAllReduce, kCall);
  watches[2]->fail("out of cheese");
  const Culprit first = watches[1]->find(kAll, -1, false, kCall);
  EXPECT_EQ(first.rank, 2);
  EXPECT_THAT(
      first.text,
      AllOf(
          HasSubstr("rank 2 (pid "),
          HasSubstr("), last operation all_reduce seq 12, failed: out of "
                    "cheese")));
  // Rank 0 sees the connection to rank 1 break, which has only followed.
  EXPECT_EQ(watches[0]->find({kAll.data(), 2}, 1, false, kCall).rank, 2);
}

TEST(PeerWatch, ARankThatLeftIsNamed) {
  const Watches watches = open_all({"a", "a", "a"});
  watches[1]->leave();
  const Culprit culprit = watches[0]->find(kAll, 2, false, kCall);
  EXPECT_EQ(culprit.rank, 1);
  EXPECT_THAT(culprit.text, HasSubstr("has left the world"));
}

TEST(PeerWatch, WhoStaysBehindIsNamedAtATimeout) {
  const Watches watches = open_all({"a", "a", "a"});
  watches[0]->note(CollectiveKind::kAllReduce, kCall);
  watches[1]->note(CollectiveKind::kBroadcast, {.group = 5, .seq = 11});
  watches[2]->note(CollectiveKind::kAllReduce, kCall);
  const Culprit culprit = watches[0]->find(kAll, -1, true, kCall);
  EXPECT_EQ(culprit.rank, 1);
  EXPECT_TRUE(culprit.late);
  EXPECT_THAT(
      culprit.text,
      AllOf(
          HasSubstr("last operation broadcast seq 11, did not arrive"),
          Not(HasSubstr("rank 2"))));
  // Rank 2 sees that rank 0 has closed its connections, and rank 1 that the
  // others have given up.
  const Culprit follower = watches[2]->find(kAll, 0, false, kCall);
  EXPECT_EQ(follower.rank, 1);
  EXPECT_TRUE(follower.late);
  EXPECT_THAT(
      watches[1]->find(kAll, 0, false, kCall).text,
      HasSubstr("gave up waiting for this rank"));
}

TEST(PeerWatch, OtherMachinesHearOfACulpritThroughTheStore) {
  const Watches watches = open_all({"a", "a", "b"});
  watches[1]->fail("out of cheese");
  const Culprit culprit = watches[2]->find(kAll, 0, false, kCall);
  EXPECT_EQ(culprit.rank, 1);
  EXPECT_THAT(culprit.text, HasSubstr("out of cheese"));
}

TEST(PeerWatch, AMachineThatSaysNothingIsNamedByItsConnection) {
  const Watches watches = open_all({"a", "b", "b"});
  const Culprit culprit = watches[0]->find(kAll, 2, false, kCall);
  EXPECT_EQ(culprit.rank, 2);
  EXPECT_THAT(culprit.text, HasSubstr("went away without a word"));
}

TEST(PeerWatch, WhatDoesNotDescribeARankIsRefused) {
  for (const char* text : {"", "{}", "[]", "{\"pid\": \"x\"}", "\xff"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::string value = std::string(text) + " ";
    store->set("peer/1", std::vector<uint8_t>(value.begin(), value.end()));
    EXPECT_THROW(
        PeerWatch::open(
            {.store = store,
             .rank = 0,
             .size = 2,
             .timeout = std::chrono::seconds(5),
             .machine = "a"}),
        PeerError)
        << text;
  }
}

// In a world over gloo.
TEST(PeerFailure, NamesARankThatLeftAndOneThatIsLate) {
  run_ranks(
      3,
      [](World world) {
        world.group().barrier()->wait();
        if (world.rank() == 2) {
          return;
        }
        EXPECT_THAT(
            [&] {
              world.group().all_reduce(at::ones({5}), ReduceOp::kSum)->wait();
            },
            ThrowsMessage<PeerError>(AllOf(
                HasSubstr("rank 2 (pid "),
                HasSubstr("last operation barrier seq 1, has left"))));
      },
      {.backend = "gloo"});
  run_ranks(
      3,
      [](World world) {
        if (world.rank() == 1) {
          world.store()->wait({"seen by 0", "seen by 2"});
          return;
        }
        EXPECT_THAT(
            [&] {
              world.group().all_reduce(at::ones({5}), ReduceOp::kSum)->wait();
            },
            ThrowsMessage<TimeoutError>(HasSubstr("rank 1 (pid ")));
        world.store()->set("seen by " + std::to_string(world.rank()), "1");
      },
      {.backend = "gloo", .timeout = std::chrono::milliseconds(500)});
}

} // namespace
} // namespace tessera
