// SPDX-License-Identifier: Apache-2.0
// Ranks that fail in the middle of a loop that looks like training, as real
// processes: whatever happens to one, the others end in time with an error that
// names it, and nothing stays behind.
//
// The test launches this executable once more, as a server that forks a fresh
// job of ranks for each round: forking is a hundred times cheaper than starting
// a program that loads libtorch, and needs a parent that has used no threads.
// TESSERA_FAULT_ROUNDS chooses the number of rounds, TESSERA_FAULT_SEED the
// first of them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/launch.h>
#include <tessera/comm/world.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Counts = std::vector<int64_t>;

constexpr int64_t kRanks = 3;
constexpr auto kTimeout = std::chrono::milliseconds(1500); // of a collective
constexpr auto kInTime = std::chrono::seconds(5);
constexpr auto kHang = std::chrono::seconds(15);

enum class Fault {
  kKill,
  kKillAnytime, // from a second thread, wherever the first one is
  kStop,
  kStopAnytime,
  kExitZero,
  kException,
  kNoMemory,
  kStayAway,
  kOperation,
  kShape,
  kDtype,
  kReduction,
  kRoot,
  kCounts,
  kOrder,
  kCount
};

const char* name_of(Fault fault) {
  static constexpr std::array kNames = {
      "kill",
      "kill anytime",
      "stop",
      "stop anytime",
      "exit 0",
      "throw",
      "no memory",
      "stay away",
      "operation",
      "shape",
      "dtype",
      "reduction",
      "root",
      "counts",
      "order"};
  return kNames.at(static_cast<std::size_t>(fault));
}

bool ends_by_timeout(Fault fault) {
  return fault == Fault::kStop || fault == Fault::kStopAnytime ||
      fault == Fault::kStayAway;
}

// What a round's ranks tell the server, in memory that they share.
struct Report {
  std::atomic<int64_t> failed_at_ns; // when the fault happened
  struct Rank {
    std::atomic<bool> caught;
    std::array<char, 3000> error;
  };
  std::array<Rank, kRanks> ranks;
};

struct Round {
  std::string backend;
  Fault fault;
  int64_t culprit;
  int64_t at; // the call before which, or near which, it happens
  uint64_t seed;
  uint16_t port;
};

// A step of training, call by call, for ever.
class Loop {
 public:
  Loop(const World& world, const Round& round, Report& report)
      : world_(world),
        group_(world.group()),
        round_(round),
        report_(report),
        small_(at::ones({1000})),
        large_(group_.allocate({60'000 * kRanks}).fill_(1)),
        part_(at::ones({60'000})) {}

  [[noreturn]] void run() {
    for (int64_t call = 0;; ++call) {
      if (call == round_.at && world_.rank() == round_.culprit) {
        commit(call);
      } else {
        regular(call % 6);
      }
      large_.fill_(1);
    }
  }

 private:
  void regular(int64_t which) {
    switch (which) {
      case 0:
        group_.all_reduce(small_, ReduceOp::kMax)->wait();
        break;
      case 1:
        group_.reduce_scatter(large_, part_, counts_, ReduceOp::kSum)->wait();
        break;
      case 2:
        group_.all_gather(part_, large_, counts_)->wait();
        break;
      case 3:
        group_.broadcast(small_, 1)->wait();
        break;
      case 4:
        group_.all_reduce(large_, ReduceOp::kAvg)->wait();
        break;
      default:
        group_.all_to_all(large_, other_, counts_, counts_)->wait();
    }
  }

  void mark() {
    report_.failed_at_ns.store(Clock::now().time_since_epoch().count());
  }

  // Something else than the others call at this point.
  void deviate(const std::function<void()>& call) {
    mark();
    call();
    throw std::runtime_error("a mismatch went through");
  }

  void anytime(int signal) {
    std::mt19937_64 random(round_.seed);
    std::thread([this, signal, wait = random() % 3000] {
      std::this_thread::sleep_for(std::chrono::microseconds(wait));
      mark();
      kill(getpid(), signal);
    }).detach();
  }

  void commit(int64_t call);
  void mismatch(int64_t call);

  World world_;
  Group group_;
  const Round& round_;
  Report& report_;
  at::Tensor small_;
  at::Tensor large_;
  at::Tensor part_;
  at::Tensor other_ = at::empty({60'000 * kRanks});
  Counts counts_ = Counts(kRanks, 60'000);
};

void Loop::commit(int64_t call) {
  switch (round_.fault) {
    case Fault::kKill:
      mark();
      kill(getpid(), SIGKILL);
      break;
    case Fault::kKillAnytime:
      anytime(SIGKILL);
      regular(call % 6);
      break;
    case Fault::kStop:
      mark();
      kill(getpid(), SIGSTOP);
      break;
    case Fault::kStopAnytime:
      anytime(SIGSTOP);
      regular(call % 6);
      break;
    case Fault::kExitZero:
      mark();
      std::_Exit(0);
    case Fault::kException:
      mark();
      throw std::runtime_error("something else went wrong");
    case Fault::kNoMemory: {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{1 << 16, 1 << 16};
      setrlimit(RLIMIT_FSIZE, &limit);
      const rlimit space{1 << 28, 1 << 28};
      setrlimit(RLIMIT_AS, &space);
      mark();
      group_.allocate({int64_t{1} << 30});
      break;
    }
    case Fault::kStayAway:
      mark();
      while (true) {
        pause();
      }
    default:
      mismatch(call);
  }
}

// Calls something else than the others.
void Loop::mismatch(int64_t call) {
  switch (round_.fault) {
    case Fault::kOperation:
      deviate([&] { group_.barrier()->wait(); });
      break;
    case Fault::kShape:
      deviate([&] {
        at::Tensor x = at::ones({call % 6 == 0 ? 1001 : 999});
        call % 6 == 3 ? group_.broadcast(x, 1)->wait()
                      : group_.all_reduce(x, ReduceOp::kMax)->wait();
      });
      break;
    case Fault::kDtype:
      deviate([&] {
        at::Tensor x = at::ones({1000}, at::kInt);
        call % 6 == 3 ? group_.broadcast(x, 1)->wait()
                      : group_.all_reduce(x, ReduceOp::kMax)->wait();
      });
      break;
    case Fault::kReduction:
      deviate([&] {
        group_.all_reduce(call % 6 == 4 ? large_ : small_, ReduceOp::kMin)
            ->wait();
      });
      break;
    case Fault::kRoot:
      deviate([&] { group_.broadcast(small_, 2)->wait(); });
      break;
    case Fault::kCounts:
      deviate([&] {
        const Counts counts{60'000, 59'999, 60'001};
        const int64_t own = counts[static_cast<std::size_t>(group_.rank())];
        group_.all_gather(at::ones({own}), large_, counts)->wait();
      });
      break;
    case Fault::kOrder:
      deviate([&] { regular((call + 1) % 6); });
      break;
    default:
      break;
  }
}

// One rank's life. It never returns into the server.
[[noreturn]] void be_rank(int64_t rank, const Round& round, Report& report) {
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  Report::Rank& own = report.ranks.at(static_cast<std::size_t>(rank));
  try {
    setenv("RANK", std::to_string(rank).c_str(), 1);
    const World world = init({.backend = round.backend, .timeout = kTimeout});
    Loop(world, round, report).run();
  } catch (const Error& error) {
    copy_text(own.error.data(), own.error.size(), error.what());
    own.caught = true;
  } catch (const std::exception& error) {
    copy_text(
        own.error.data(),
        own.error.size(),
        std::string("not one of ours: ") + error.what());
  }
  std::_Exit(own.caught ? 3 : 4);
}

uint16_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  bind(fd, generic, length);
  getsockname(fd, generic, &length);
  close(fd);
  return ntohs(address.sin_port);
}

Round round_of(uint64_t seed, const std::string& backend) {
  std::mt19937_64 random(seed);
  Round round{
      .backend = backend,
      .fault = static_cast<Fault>(seed % static_cast<uint64_t>(Fault::kCount)),
      .culprit = static_cast<int64_t>(random() % kRanks),
      .at = 6 + static_cast<int64_t>(random() % 60),
      .seed = seed,
      .port = free_port()};
  // Where only one of the calls lets the two of them differ in this alone.
  const auto align = [&](int64_t which) {
    round.at = round.at / 6 * 6 + which;
  };
  if (round.fault == Fault::kRoot) {
    align(3);
  } else if (round.fault == Fault::kCounts) {
    align(2);
  } else if (round.fault == Fault::kReduction) {
    align(random() % 2 == 0 ? 0 : 4);
  } else if (round.fault == Fault::kShape || round.fault == Fault::kDtype) {
    align(random() % 2 == 0 ? 0 : 3);
  }
  return round;
}

class Server {
 public:
  // Runs one round; returns what was wrong, or nothing.
  std::string run(const Round& round) {
    auto* memory = mmap(
        nullptr,
        sizeof(Report),
        PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS,
        -1,
        0);
    auto* report = new (memory) Report;
    setenv("WORLD_SIZE", std::to_string(kRanks).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", std::to_string(round.port).c_str(), 1);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      pids_.at(static_cast<std::size_t>(rank)) = fork();
      if (pids_.at(static_cast<std::size_t>(rank)) == 0) {
        be_rank(rank, round, *report);
      }
    }
    const std::string verdict = judge(round, *report);
    munmap(memory, sizeof(Report));
    return verdict;
  }

  int64_t hangs() const {
    return hangs_;
  }
  double slowest_s() const {
    return slowest_s_;
  }

 private:
  std::string judge(const Round& round, Report& report) {
    std::string verdict;
    const auto start = Clock::now();
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      if (rank != round.culprit && !wait_for(rank, start + kHang)) {
        verdict += " rank " + std::to_string(rank) + " hangs;";
        ++hangs_;
      }
      if (rank != round.culprit) {
        verdict += check(round, report, rank);
      }
    }
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    return verdict;
  }

  // Whether the rank ended before the deadline.
  bool wait_for(int64_t rank, Clock::time_point deadline) const {
    const pid_t pid = pids_.at(static_cast<std::size_t>(rank));
    while (Clock::now() < deadline) {
      siginfo_t info{};
      waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT);
      if (info.si_pid == pid) {
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }

  std::string check(const Round& round, Report& report, int64_t rank) {
    const auto& own = report.ranks.at(static_cast<std::size_t>(rank));
    const std::string text = own.error.data();
    const std::string who = " rank " + std::to_string(rank);
    const auto taken = std::chrono::nanoseconds(
        Clock::now().time_since_epoch().count() - report.failed_at_ns);
    slowest_s_ =
        std::max(slowest_s_, std::chrono::duration<double>(taken).count());
    const auto limit = ends_by_timeout(round.fault)
        ? std::chrono::nanoseconds(kTimeout + kInTime)
        : std::chrono::nanoseconds(kInTime);
    if (report.failed_at_ns == 0) {
      return who + " failed before the fault: '" + text + "';";
    }
    if (taken > limit) {
      return who + " ended late;";
    }
    if (!own.caught) {
      return who + " caught no error of ours: '" + text + "';";
    }
    const std::string culprit = "rank " + std::to_string(round.culprit);
    if (text.find(culprit + " (") == std::string::npos &&
        text.find("[" + culprit + "/") == std::string::npos) {
      return who + " names no culprit: '" + text + "';";
    }
    return {};
  }

  std::array<pid_t, kRanks> pids_{};
  int64_t hangs_ = 0;
  double slowest_s_ = 0;
};

int64_t leftovers() {
  int64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += entry.path().filename().string().starts_with("tessera") ? 1 : 0;
  }
  return count;
}

TEST(FaultServer, DISABLED_Run) {
  const std::string backend =
      environment("TESSERA_FAULT_BACKEND").value_or("shm");
  const auto rounds = static_cast<uint64_t>(
      environment_int("TESSERA_FAULT_ROUNDS").value_or(30));
  const auto first =
      static_cast<uint64_t>(environment_int("TESSERA_FAULT_SEED").value_or(0));
  const int64_t before = leftovers();
  Server server;
  int64_t wrong = 0;
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    const Round round = round_of(seed, backend);
    const std::string verdict = server.run(round);
    wrong += verdict.empty() ? 0 : 1;
    EXPECT_EQ(verdict, "") << "seed " << seed << ", " << name_of(round.fault)
                           << " on rank " << round.culprit << " at call "
                           << round.at << " over " << backend;
  }
  EXPECT_EQ(leftovers(), before);
  std::cout << "faults over " << backend << ": " << rounds << " rounds, "
            << server.hangs() << " hangs, "
            << rounds - static_cast<uint64_t>(wrong)
            << " ended in time with the culprit's name, slowest end "
            << server.slowest_s() << " s" << std::endl;
}

void run_server(const std::string& backend) {
  std::array<char, 4096> path{};
  ASSERT_GT(readlink("/proc/self/exe", path.data(), path.size() - 1), 0);
  EXPECT_EQ(
      launch(
          {.command =
               {path.data(),
                "--gtest_also_run_disabled_tests",
                "--gtest_filter=FaultServer.DISABLED_Run"},
           .ranks = 1,
           .environment = {{"TESSERA_FAULT_BACKEND", backend}}}),
      0);
}

TEST(Faults, OverShmEndInTimeAndNameTheCulprit) {
  run_server("shm");
}

} // namespace
} // namespace tessera
