// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes: a test launches this executable again, once per
// rank, with a filter that chooses one of the disabled tests below, which are
// what the ranks do.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/conformance.h>
#include <tessera/comm/launch_testing.h>
#include <tessera/comm/rank_status.h>
#include <tessera/comm/world.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// What a rank's body may take: any error of ours becomes a line on standard
// output and code 3.
template <typename Body>
void as_rank(Body body, InitOptions options = {}) {
  try {
    World world = init(options);
    body(world);
  } catch (const Error& error) {
    std::cout << "caught: " << error.what() << std::endl;
    std::_Exit(3);
  }
}

void reduce(const World& world, const at::Tensor& x) {
  world.group().all_reduce(x, ReduceOp::kSum)->wait();
}

TEST(RankBody, DISABLED_Collectives) {
  as_rank([](const World& world) {
    const int64_t size = world.size();
    EXPECT_EQ(
        world.group().backend_name(),
        size == 1 ? "single" : environment("TESSERA_BACKEND").value_or("shm"));
    for (const int64_t numel : {0, 3, 1000, 500'001}) {
      at::Tensor x = at::full({numel}, world.rank() + 1, at::kFloat);
      reduce(world, x);
      EXPECT_TRUE(x.eq(size * (size + 1) / 2).all().item<bool>());
    }
    Counts counts;
    for (int64_t rank = 0; rank < size; ++rank) {
      counts.push_back(rank * 70'000);
    }
    const at::Tensor mine =
        at::full({world.rank() * 70'000}, world.rank(), at::kInt);
    at::Tensor all = at::empty({70'000 * size * (size - 1) / 2}, at::kInt);
    world.group().all_gather(mine, all, counts)->wait();
    at::Tensor back = at::empty_like(mine);
    world.group().reduce_scatter(all, back, counts, ReduceOp::kSum)->wait();
    EXPECT_TRUE(at::equal(back, mine * size));
    at::Tensor message = at::full({200'000}, world.rank(), at::kFloat);
    if (world.rank() == 0 && size > 1) {
      world.group().send(message, size - 1)->wait();
    } else if (world.rank() == size - 1 && size > 1) {
      world.group().recv(message, 0)->wait();
      EXPECT_TRUE(message.eq(0).all().item<bool>());
    }
    world.group().barrier()->wait();
  });
}

// The checks of comm_test.cc where ranks reach each other's memory by mapping
// it, not by address: tensors that are lent, staged and not aligned, and mixed.
TEST(RankBody, DISABLED_Conformance) {
  as_rank([](const World& world) {
    using conformance::Memory;
    for (const at::ScalarType dtype : conformance::kDtypes) {
      for (const int64_t numel : {1, 20'001}) {
        for (const ReduceOp op : conformance::kOps) {
          if (dtype != at::kBool || op != ReduceOp::kAvg) {
            conformance::check_reductions(
                world.group(), numel, dtype, op, Memory::kAllocated);
          }
        }
        conformance::check_movements(
            world.group(), numel, dtype, Memory::kAllocated);
      }
    }
    for (const Memory memory : {Memory::kPlain, Memory::kUnaligned}) {
      conformance::check_reductions(
          world.group(), 70'001, at::kBFloat16, ReduceOp::kSum, memory);
      conformance::check_movements(world.group(), 300'007, at::kInt, memory);
      conformance::check_all_to_all(world.group(), 33'000, memory);
    }
    conformance::check_large(world.group());
    conformance::check_random_sequences(world, 2000, 200);
  });
}

TEST(Process, ConformanceOnOneToFiveProcesses) {
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    const Outcome outcome = launch_body(ranks, "Conformance");
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr("caught")));
  }
}

TEST(Process, CollectivesOnOneToFourProcesses) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const Outcome outcome = launch_body(ranks, "Collectives");
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr("caught")));
  }
}

TEST(Process, CollectivesOverGloo) {
  for (const char* debug : {"0", "1"}) {
    const Outcome outcome = launch_body(
        2,
        "Collectives",
        {{"TESSERA_BACKEND", "gloo"}, {"TESSERA_DEBUG_COLLECTIVES", debug}});
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  }
}

TEST(RankBody, DISABLED_Mismatch) {
  as_rank([](const World& world) {
    const bool first = world.rank() == 0;
    const std::string kind = environment("TESSERA_TEST_KIND").value();
    if (kind == "operations" && first) {
      world.group().broadcast(at::ones({100}), 0)->wait();
    }
    const int64_t numel = kind == "shapes" && !first ? 200 : 100;
    reduce(
        world,
        at::ones({numel}, kind == "dtypes" && !first ? at::kInt : at::kFloat));
  });
}

TEST(Process, MismatchesFailBothProcesses) {
  for (const std::string kind : {"shapes", "dtypes", "operations"}) {
    const Outcome outcome = launch_and_capture(
        {.command =
             {this_program(),
              "--gtest_also_run_disabled_tests",
              "--gtest_filter=RankBody.DISABLED_Mismatch"},
         .ranks = 2,
         .environment = {{"TESSERA_TEST_KIND", kind}}});
    EXPECT_EQ(outcome.code, 3);
    EXPECT_THAT(outcome.out, HasSubstr(kind + " must match"));
  }
}

// The rank named by TESSERA_TEST_VICTIM kills itself, where the others expect
// it.
TEST(RankBody, DISABLED_Killed) {
  as_rank([](const World& world) {
    at::Tensor x = at::ones({4'000'000});
    reduce(world, x);
    const bool inside = environment("TESSERA_TEST_WHERE") == "inside";
    if (world.rank() == environment_int("TESSERA_TEST_VICTIM")) {
      if (!inside) {
        raise(SIGKILL);
      }
      std::thread([] { // dies in the middle of what the main thread does
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        raise(SIGKILL);
      })
          .detach();
    }
    for (int i = 0; i < 100'000; ++i) {
      reduce(world, x);
    }
  });
}

// Expects that ranks 0 and 2 of three got an error about an all_reduce that
// names rank 1 with its process.
void expect_named(const Unlaunched& ranks, const std::string& what) {
  EXPECT_EQ(ranks.wait(0), 3);
  EXPECT_EQ(ranks.wait(2), 3);
  for (const std::size_t rank : {0, 2}) {
    EXPECT_THAT(
        ranks.output(rank),
        AllOf(
            HasSubstr("caught: all_reduce"),
            HasSubstr("rank 1 (pid " + std::to_string(ranks.pids[1])),
            HasSubstr(what)));
  }
}

TEST(Process, KillNineIsAnErrorThatNamesTheRank) {
  for (const char* backend : {"shm", "gloo"}) {
    for (const char* where : {"inside", "between"}) {
      setenv("TESSERA_TEST_WHERE", where, 1);
      setenv("TESSERA_TEST_VICTIM", "1", 1);
      const Unlaunched ranks(3, "Killed", backend);
      expect_named(ranks, "died");
      if (std::string(backend) == "gloo") {
        EXPECT_THAT(
            ranks.output(0), HasSubstr("), last operation all_reduce seq "));
      }
      EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
    }
  }
}

TEST(RankBody, DISABLED_Stopped) {
  as_rank(
      [](const World& world) {
        at::Tensor x = at::ones({1000});
        reduce(world, x);
        if (world.rank() == 1) {
          raise(SIGSTOP);
        }
        reduce(world, x);
      },
      {.timeout = std::chrono::seconds(2)});
}

TEST(Process, AStoppedRankIsNamedAtTheTimeout) {
  for (const char* backend : {"shm", "gloo"}) {
    const Unlaunched ranks(3, "Stopped", backend);
    expect_named(
        ranks,
        std::string(backend) == "gloo"
            ? "last operation all_reduce seq 1, is stopped by a signal"
            : "did not arrive within 2000 ms");
    kill(ranks.pids[1], SIGKILL);
    ranks.wait(1);
  }
}

// Rank 3 waits only for rank 2, which waits for rank 0: the broadcast's tree.
TEST(RankBody, DISABLED_KilledAboveOthers) {
  as_rank([](const World& world) {
    at::Tensor x = at::ones({1000});
    world.group().broadcast(x, 0)->wait();
    if (world.rank() == 0) {
      raise(SIGKILL);
    }
    try {
      world.group().broadcast(x, 0)->wait();
    } catch (const PeerError& error) {
      std::cout << "caught: " << error.what() << std::endl;
      // Stays until the others have got theirs: not its end tells them.
      std::this_thread::sleep_for(std::chrono::seconds(3));
      std::_Exit(3);
    }
  });
}

TEST(Process, RanksThatDoNotTalkToTheDeadOneHearOfIt) {
  const Unlaunched ranks(4, "KilledAboveOthers", "gloo");
  EXPECT_EQ(ranks.wait(0), 128 + SIGKILL);
  for (const std::size_t rank : {1, 2, 3}) {
    EXPECT_EQ(ranks.wait(rank), 3);
    EXPECT_THAT(
        ranks.output(rank),
        AllOf(
            HasSubstr("rank 0 (pid " + std::to_string(ranks.pids[0])),
            HasSubstr("last operation broadcast seq 1, died")));
  }
}

// Every socket that listens in this process, as /proc/net/tcp and tcp6 write
// addresses.
std::vector<std::string> listening_addresses() {
  std::vector<std::string> own;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    own.push_back(std::filesystem::read_symlink(entry, gone).string());
  }
  std::vector<std::string> addresses;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream words(line);
      const std::vector<std::string> word{
          std::istream_iterator<std::string>(words), {}};
      const std::string socket = "socket:[" + word.at(9) + "]";
      if (word.at(3) == "0A" && std::ranges::count(own, socket) > 0) {
        addresses.push_back(word.at(1));
      }
    }
  }
  return addresses;
}

TEST(RankBody, DISABLED_Listens) {
  as_rank([](const World& world) {
    reduce(world, at::ones({3}));
    const auto addresses = listening_addresses();
    if (world.rank() == 0) {
      EXPECT_THAT(addresses, Not(testing::IsEmpty())); // of the store
    }
    for (const std::string& address : addresses) {
      EXPECT_THAT(address, testing::StartsWith("0100007F:")); // 127.0.0.1
    }
    world.group().barrier()->wait();
  });
}

TEST(Process, RanksListenOnLoopbackOnly) {
  for (const char* backend : {"shm", "gloo"}) {
    const Outcome outcome =
        launch_body(2, "Listens", {{"TESSERA_BACKEND", backend}});
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  }
}

TEST(Process, LauncherReturnsTheCodeOfAKilledRank) {
  const Outcome outcome = launch_body(
      2,
      "Killed",
      {{"TESSERA_TEST_WHERE", "between"}, {"TESSERA_TEST_VICTIM", "1"}});
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 (pid "));
}

TEST(RankBody, DISABLED_HandlerExitsZero) {
  as_rank([](const World& world) {
    at::Tensor x = at::ones({10});
    reduce(world, x);
    if (world.rank() == 1) {
      std::signal(SIGUSR1, [](int) { std::_Exit(0); });
      raise(SIGUSR1);
    }
    reduce(world, x);
  });
}

TEST(Process, ARankWhoseSignalHandlerExitsZeroFailsTheJob) { // ace 1068
  for (const char* backend : {"shm", "gloo"}) {
    const auto start = std::chrono::steady_clock::now();
    const Outcome outcome =
        launch_body(3, "HandlerExitsZero", {{"TESSERA_BACKEND", backend}});
    EXPECT_NE(outcome.code, 0);
    EXPECT_LT(
        std::chrono::steady_clock::now() - start,
        std::chrono::seconds(60)); // not for ever
  }
}

// As above, but the sibling waits where only the launcher can tell: in the
// rendezvous.
TEST(RankBody, DISABLED_LeavesBeforeTheOthersMeet) {
  if (environment_int("RANK") == 1) {
    find_rank_status(1, 2)->phase.store(RankPhase::kJoined);
    std::_Exit(0);
  }
  as_rank([](const World& /*world*/) {});
}

TEST(Process, ARankThatLeavesOutOfOrderIsNamed) {
  const Outcome outcome = launch_body(2, "LeavesBeforeTheOthersMeet");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(
      outcome.err,
      AllOf(
          HasSubstr("rank 1 (pid "),
          HasSubstr("without leaving its world"),
          HasSubstr("rank 0 waits")));
}

TEST(RankBody, DISABLED_OneLeavesEarly) {
  as_rank([](const World& world) {
    reduce(world, at::ones({3}));
    if (world.rank() == 0) {
      std::this_thread::sleep_for(
          std::chrono::milliseconds(500)); // works on after the other has left
      std::cout << "wrote the checkpoint" << std::endl;
    }
  });
}

TEST(Process, ARankThatLeavesInOrderIsFine) {
  const Outcome outcome = launch_body(2, "OneLeavesEarly");
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("[0] wrote the checkpoint"));
}

class InitVariables : public testing::Test {
 protected:
  void SetUp() override {
    clear();
  }
  void TearDown() override {
    clear();
  }

  static void clear() {
    for (const char* name :
         {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "MASTER_ADDR",
          "MASTER_PORT",
          "TESSERA_BACKEND"}) {
      unsetenv(name);
    }
  }

  static void expect_refused(const std::string& text) {
    EXPECT_THAT(
        [] { init(); }, testing::ThrowsMessage<UsageError>(HasSubstr(text)));
  }
};

TEST_F(InitVariables, NoneMakeAWorldOfOne) {
  const World world = init();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.group().backend_name(), "single");
}

TEST_F(InitVariables, IncompleteOrNonsensicalAreRefused) {
  setenv("RANK", "0", 1);
  expect_refused("WORLD_SIZE is not set");
  setenv("WORLD_SIZE", "2", 1);
  expect_refused("MASTER_ADDR is not set");
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  expect_refused("MASTER_PORT is not set");
  setenv("MASTER_PORT", "99999", 1);
  expect_refused("MASTER_PORT=99999");
  setenv("RANK", "2", 1);
  expect_refused("RANK=2, expected 0 to 1");
  setenv("RANK", "one", 1);
  expect_refused("RANK=one");
  setenv("TESSERA_BACKEND", "pigeon", 1);
  expect_refused("pigeon");
}

} // namespace
} // namespace tessera
