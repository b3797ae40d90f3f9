// SPDX-License-Identifier: Apache-2.0
// One pass over the memory of all ranks, as threads and as processes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch_testing.h>
#include <tessera/comm/run_ranks.h>

#include <csignal>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kEach = 10'000; // elements of a rank's own part

// Every rank adds up its part of all inputs, in rank order, and writes the sum
// to every rank's output.
void sum_to_all(
    const Group& group, const at::Tensor& in, const at::Tensor& out) {
  const at::Tensor lent[] = {in, out};
  group
      .with_peers(
          lent,
          [rank = group.rank()](PeerBuffers buffers) {
            const int64_t begin = rank * kEach;
            for (int64_t i = begin; i < begin + kEach; ++i) {
              float sum = 0;
              for (const std::byte* input : buffers[0]) {
                sum += reinterpret_cast<const float*>(input)[i];
              }
              for (std::byte* output : buffers[1]) {
                reinterpret_cast<float*>(output)[i] = sum;
              }
            }
          })
      ->wait();
}

// Many rounds, whose inputs change right after each: a rank that went on too
// early, or read too late, would be seen.
void expect_sums(const Group& group) {
  const int64_t numel = kEach * group.size();
  const at::Tensor in = group.allocate({numel}, at::kFloat);
  const at::Tensor out = group.allocate({numel}, at::kFloat);
  for (int64_t round = 0; round < 50; ++round) {
    in.copy_(at::arange(numel, at::kFloat)
                 .remainder_(100)
                 .add_(group.rank() * 100 + round));
    sum_to_all(group, in, out);
    in.fill_(-1);
    at::Tensor expected = at::zeros({numel});
    for (int64_t rank = 0; rank < group.size(); ++rank) {
      expected += at::arange(numel, at::kFloat)
                      .remainder_(100)
                      .add_(rank * 100 + round);
    }
    ASSERT_TRUE(at::equal(out, expected)) << "round " << round;
  }
}

TEST(WithPeers, ThreadsSeeAndWriteEachOthersMemory) {
  for (const int64_t n : {1, 2, 3, 4}) {
    run_ranks(n, [](World world) {
      expect_sums(world.group());
      expect_sums(world.group().background());
    });
  }
}

TEST(RankBody, DISABLED_WithPeers) {
  const World world = init();
  expect_sums(world.group());
  expect_sums(world.group().background());
}

TEST(WithPeers, ProcessesSeeAndWriteEachOthersMemory) {
  for (const int64_t n : {2, 3, 4}) {
    const Outcome outcome = launch_body(n, "WithPeers");
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  }
}

TEST(WithPeers, IsRecordedWithTheBytesThatAreLent) {
  run_ranks(2, [](World world) {
    const at::Tensor lent[] = {
        world.group().allocate({10}), world.group().allocate({6})};
    world.group().with_peers(lent, [](PeerBuffers) {})->wait();
    EXPECT_EQ(world.record().count(CollectiveKind::kWithPeers), 1);
    EXPECT_EQ(world.record().bytes(CollectiveKind::kWithPeers), 64);
    EXPECT_EQ(world.record().total_count(), 1);
  });
}

TEST(WithPeers, TakesEmptyTensorsAndOneTensor) {
  run_ranks(3, [](World world) {
    const Group group = world.group();
    const at::Tensor lent[] = {group.allocate({0}), group.allocate({1})};
    group.with_peers(lent, [](PeerBuffers buffers) {
      EXPECT_EQ(buffers.size(), 2);
      EXPECT_EQ(buffers[1].size(), 3);
    });
    const at::Tensor flag = at::zeros({group.size()}, at::kByte);
    group.with_peers({&flag, 1}, [&](PeerBuffers buffers) {
      for (std::byte* peer : buffers[0]) {
        peer[group.rank()] = std::byte{1};
      }
    });
    EXPECT_TRUE(flag.all().item<bool>());
  });
}

TEST(WithPeers, DifferentSizesAreAnErrorOnEveryRank) {
  run_ranks(3, [](World world) {
    const at::Tensor lent = at::zeros({world.rank() == 1 ? 5 : 4}, at::kByte);
    EXPECT_THAT(
        [&] {
          world.group().with_peers({&lent, 1}, [](PeerBuffers) {});
        },
        ThrowsMessage<PeerError>(AllOf(
            HasSubstr("with_peers [rank"),
            HasSubstr("[4]"),
            HasSubstr("[5]"),
            HasSubstr("shapes must match"))));
  });
}

TEST(WithPeers, OtherBackendsLendNothing) {
  run_ranks(
      2,
      [](World world) {
        const at::Tensor lent = world.group().allocate({4});
        EXPECT_FALSE(world.group().can_lend({&lent, 1}));
        EXPECT_THROW(
            world.group().with_peers({&lent, 1}, [](PeerBuffers) {}),
            UsageError);
      },
      {.backend = "gloo"});
}

TEST(WithPeers, WrongArgumentsAreRefusedBeforeAnythingIsAnnounced) {
  run_ranks(2, [](World world) {
    const std::vector<at::Tensor> three(3, at::zeros({4}));
    const at::Tensor strided = at::zeros({4, 4}).t();
    const Group group = world.group();
    const auto nothing = [](PeerBuffers) {};
    EXPECT_THROW(group.with_peers({}, nothing), UsageError);
    EXPECT_THROW(group.with_peers(three, nothing), UsageError);
    EXPECT_THROW(group.with_peers({&strided, 1}, nothing), UsageError);
    group.barrier()->wait();
  });
}

TEST(WithPeers, AFunctionThatThrowsTellsTheOthersWhy) {
  run_ranks(3, [](World world) {
    const at::Tensor lent = world.group().allocate({1000});
    const auto call = [&] {
      world.group().with_peers({&lent, 1}, [&](PeerBuffers) {
        if (world.rank() == 2) {
          throw std::runtime_error("no such thing");
        }
      });
    };
    if (world.rank() == 2) {
      EXPECT_THAT(
          call, ThrowsMessage<std::runtime_error>(HasSubstr("no such thing")));
    } else {
      EXPECT_THAT(
          call,
          ThrowsMessage<PeerError>(AllOf(
              HasSubstr("with_peers [rank"), HasSubstr("no such thing"))));
    }
  });
}

// Memory that is not shared, on one rank of two processes.
TEST(RankBody, DISABLED_OneCannotLend) {
  const World world = init();
  const Group group = world.group();
  const at::Tensor lent =
      world.rank() == 0 ? at::zeros({1000}) : group.allocate({1000});
  EXPECT_EQ(group.can_lend({&lent, 1}), world.rank() == 1);
  EXPECT_THAT(
      [&] {
        group.with_peers({&lent, 1}, [](PeerBuffers) { FAIL(); });
      },
      ThrowsMessage<UsageError>(HasSubstr("Group::allocate")));
  expect_sums(group); // the group goes on
}

TEST(WithPeers, MemoryOutOfReachIsAnErrorAndTheGroupGoesOn) {
  const Outcome outcome = launch_body(2, "OneCannotLend");
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
}

TEST(RankBody, DISABLED_DiesWithPeers) {
  try {
    const World world = init();
    const at::Tensor lent = world.group().allocate({1'000'000});
    world.group().with_peers({&lent, 1}, [&](PeerBuffers buffers) {
      if (world.rank() == 1) {
        raise(SIGKILL);
      }
      for (std::byte* peer : buffers[0]) {
        peer[0] = std::byte{1};
      }
    });
  } catch (const PeerError& error) {
    std::cout << "caught: " << error.what() << std::endl;
    std::_Exit(3);
  }
}

TEST(WithPeers, ADeathInTheFunctionIsAnErrorThatNamesTheRank) {
  const Unlaunched ranks(3, "DiesWithPeers", "shm");
  for (const std::size_t rank : {0, 2}) {
    EXPECT_EQ(ranks.wait(rank), 3);
    EXPECT_THAT(
        ranks.output(rank),
        AllOf(
            HasSubstr("caught: with_peers [rank"),
            HasSubstr("rank 1 (pid " + std::to_string(ranks.pids[1])),
            HasSubstr("died")));
  }
  EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
}

} // namespace
} // namespace tessera
