// SPDX-License-Identifier: Apache-2.0
// Ranks that say what is not so, and memory that outlives what goes wrong. The
// tests write into the window what a peer would.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tessera/base/error.h>
#include <tessera/comm/shm_arena.h>
#include <tessera/comm/shm_engine.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Counts = std::vector<int64_t>;

struct Rank {
  int64_t number;
  ShmWindow& window;
  ShmEngine& engine;
  c10d::Store& store;

  // Returns when `rank` has come to the meeting of `step`, and waits there.
  void await(int64_t rank, uint32_t step) const {
    while (window.member(rank).arrived.load() != step) {
      std::this_thread::yield();
    }
  }
};

// Runs `fn` on n threads, each with an engine of one group.
void run_engines(
    int64_t n,
    const std::function<void(const Rank&)>& fn,
    milliseconds timeout = std::chrono::seconds(60)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Counts ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  std::vector<std::thread> threads;
  for (const int64_t rank : ranks) {
    threads.emplace_back([&, rank] {
      try {
        const auto window = ShmWindow::open(store, rank, n, timeout);
        ShmEngine engine(
            window,
            {.rank = rank,
             .world_ranks = ranks,
             .name = "test",
             .id = "test",
             .timeout = timeout,
             .store = store,
             .peers = nullptr});
        fn({rank, *window, engine, *store});
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Rank 1 lends memory of the arena, first truly, then with a size that the
// memory has not.
TEST(ShmEngine, RefusesAnOfferBeyondTheMemoryThatItKnows) {
  constexpr int64_t kEach = 100'000;
  run_engines(2, [](const Rank& rank) {
    at::Tensor in = shm_tensor({kEach}, at::kFloat);
    at::Tensor out = at::zeros({2 * kEach});
    in.fill_(rank.number + 1);
    rank.store.set(
        "in/" + std::to_string(rank.number),
        std::to_string(reinterpret_cast<std::uintptr_t>(in.data_ptr())));
    const auto gather = [&] {
      rank.engine.all_gather(in, out, Counts{kEach, kEach});
    };
    if (rank.number == 1) {
      gather();
      EXPECT_THAT(gather, ThrowsMessage<PeerError>(HasSubstr("offers")));
      return;
    }
    const auto* peers = reinterpret_cast<const void*>(
        std::stoull(rank.store.get_to_str("in/1")));
    const auto range = ShmArena::instance().find(peers, kEach * 4);
    ASSERT_TRUE(range);
    rank.await(1, 1);
    rank.window.offer(1, 1) = {
        .reach = Reach::kArena, .range = *range, .bytes = kEach * 4};
    gather();
    EXPECT_EQ(out.sum().item<int64_t>(), 3 * kEach);
    rank.await(1, 3); // the first call took two meetings
    ShmOffer& lie = rank.window.offer(1, 2);
    lie = {.reach = Reach::kArena, .range = *range, .bytes = kEach * 4};
    lie.range.memory.bytes = uint64_t{1} << 62;
    lie.range.offset = uint64_t{1} << 50;
    EXPECT_THAT(
        gather,
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("rank 1"), HasSubstr("offers 400000 bytes"))));
  });
}

TEST(ShmEngine, RefusesCountsOfAnAllToAllThatCannotBe) {
  for (const int64_t lie : {int64_t{-5}, int64_t{1} << 60}) {
    run_engines(3, [lie](const Rank& rank) {
      if (rank.number == 0) {
        rank.await(1, 1);
        rank.await(2, 1);
        rank.window.counts(1, 1)[2] = lie; // rank 1 to rank 2
        rank.window.counts(2, 1)[3 + 1] = lie;
      }
      const at::Tensor in = at::ones({3});
      const at::Tensor out = at::zeros({3});
      const Counts one{1, 1, 1};
      EXPECT_THAT(
          [&] { rank.engine.all_to_all(in, out, one, one); },
          ThrowsMessage<PeerError>(HasSubstr("counts must match")));
    });
  }
}

TEST(ShmEngine, RefusesARingThatHoldsMoreThanItCan) {
  run_engines(2, [](const Rank& rank) {
    if (rank.number == 1) {
      rank.store.wait({"done"});
      return;
    }
    rank.window.channel(1, 0).written.store(uint64_t{1} << 40);
    EXPECT_THAT(
        [&] { rank.engine.start_recv(at::zeros({3}), 1, 0); },
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("recv"), HasSubstr("from rank 1"))));
    rank.store.set("done", "1");
  });
  run_engines(2, [](const Rank& rank) {
    if (rank.number == 1) {
      rank.store.wait({"done"});
      return;
    }
    rank.window.channel(0, 1).read.store(1); // of nothing that was written
    EXPECT_THAT(
        [&] { rank.engine.start_send(at::zeros({3}), 1, 0); },
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("send"), HasSubstr("in a ring of"))));
    rank.store.set("done", "1");
  });
}

TEST(ShmEngine, ACollectiveFailsOverAMessageThatCannotGoOn) {
  run_engines(2, [](const Rank& rank) {
    const at::Tensor x = at::ones({100'000});
    if (rank.number == 0) {
      rank.engine.start_recv(at::zeros({3}), 1, 0);
    } else {
      rank.await(0, 1);
      rank.window.channel(1, 0).written.store(uint64_t{1} << 40);
      while (rank.window.control().failure.load() == FailureState::kNone) {
        std::this_thread::yield();
      }
    }
    EXPECT_THAT(
        [&] { rank.engine.all_reduce(x, ReduceOp::kSum); },
        ThrowsMessage<PeerError>(
            AllOf(HasSubstr("all_reduce"), HasSubstr("in a ring of"))));
  });
}

// A peer in the middle of lent memory that does not get on may write there at
// any time, also when the group has gone.
TEST(ShmEngine, MemoryThatAPeerMayStillUseIsNeverFreed) {
  static std::vector<float> memory(100'000);
  static std::atomic<bool> freed = false;
  run_engines(
      2,
      [](const Rank& rank) {
        if (rank.number == 1) {
          rank.store.wait({"gone"});
          return;
        }
        rank.window.member(1).touching.store(1);
        const auto size = static_cast<int64_t>(memory.size());
        at::Tensor x = at::from_blob(
            memory.data(), {size}, [](void*) { freed = true; }, at::kFloat);
        EXPECT_THROW(rank.engine.all_reduce(x, ReduceOp::kSum), TimeoutError);
        rank.store.set("gone", "1");
      },
      milliseconds(300));
  EXPECT_FALSE(freed);
}

TEST(ShmArena, RefusesShapesThatNoMemoryHolds) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_THAT(
      [] {
        shm_tensor({2, -1}, at::kFloat);
      },
      ThrowsMessage<UsageError>(HasSubstr("[2,-1]")));
  EXPECT_THROW(shm_tensor({kHuge, kHuge}, at::kFloat), UsageError);
  EXPECT_THROW(shm_tensor({kHuge, kHuge >> 20}, at::kDouble), IoError);
  EXPECT_EQ(shm_tensor({0, 5}, at::kFloat).numel(), 0);
}

TEST(ShmArena, AForkedChildLeavesItsParentsMemoryAlone) {
  constexpr int64_t kLarge = int64_t{260}
      << 20; // its pages go when it is freed
  constexpr int64_t kSmall = 4096;
  at::Tensor large = shm_tensor({kLarge}, at::kByte);
  auto* data = static_cast<uint8_t*>(large.mutable_data_ptr());
  std::memset(data, 1, kLarge);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const at::Tensor own = shm_tensor({kSmall}, at::kByte);
    std::memset(own.mutable_data_ptr(), 7, kSmall);
    const bool apart = !ShmArena::instance().find(data, kLarge);
    large.reset();
    _exit(apart ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (int64_t at = 0; at < kLarge; at += 4096) {
    ASSERT_EQ(data[at], 1) << at;
  }
  const at::Tensor next = shm_tensor({kSmall}, at::kByte);
  EXPECT_FALSE(next.eq(7).any().item<bool>());
}

} // namespace
} // namespace tessera
