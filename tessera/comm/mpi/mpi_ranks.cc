// SPDX-License-Identifier: Apache-2.0
// One rank of a test; the first argument says what it does. It does not link
// MPI: mpi_owner.cc is a program that does.
#include <ATen/ATen.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_ranks.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

namespace tessera {
namespace {

void reduce(const World& world) {
  at::Tensor x = at::ones({1000});
  world.group().all_reduce(x, ReduceOp::kSum)->wait();
  expect(x.eq(world.size()).all().item<bool>(), "sum of ones");
}

// Says where it is, so that the test sees that every rank came so far.
void tell(const World& world, const char* what) {
  std::printf(
      "rank %d of %d, local %d: %s over %s\n",
      static_cast<int>(world.rank()),
      static_cast<int>(world.size()),
      static_cast<int>(world.local_rank()),
      what,
      world.group().backend_name().c_str());
  std::fflush(stdout);
}

void conformance() {
  const World world = init({.backend = "mpi"});
  check_everything(world);
  tell(world, "all held");
}

void smoke() {
  const World world = init();
  reduce(world);
  tell(world, "reduced");
}

void twice() {
  for (int turn = 0; turn < 2; ++turn) {
    const World world = init();
    reduce(world);
  }
  tell(init(), "third world");
}

// A Work that nobody waits for, and a message of the wrong size.
void careless() {
  const World world = init({.backend = "mpi"});
  at::Tensor x = at::ones({100'000});
  world.group().all_reduce(x, ReduceOp::kSum);
  reduce(world);
  if (world.rank() == 0) {
    world.group().send(at::ones({3}), 1)->wait();
  } else if (world.rank() == 1) {
    at::Tensor longer = at::ones({5});
    try {
      world.group().recv(longer, 0)->wait();
      expect(false, "a short message was taken");
    } catch (const PeerError& error) {
      std::printf("caught: %s\n", error.what());
    }
    try {
      reduce(world);
      expect(false, "a dead group went on");
    } catch (const PeerError& error) {
      std::printf("caught: %s\n", error.what());
    }
  }
}

// The others wait for rank 1.
World one_stays_away(const std::function<void()>& end) {
  InitOptions options;
  options.backend = environment("TESSERA_BACKEND").value_or("mpi");
  World world = init(options);
  reduce(world);
  tell(world, "joined");
  if (world.rank() == 1) {
    end();
  }
  reduce(world);
  return world;
}

void stall() {
  const World world =
      init({.backend = "mpi", .timeout = std::chrono::seconds(2)});
  reduce(world);
  if (world.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    return;
  }
  reduce(world);
}

// Rank 1 dies, alone or in the middle of what its main thread does; the others
// live on until all have told what they heard.
void killed() {
  std::signal(SIGUSR1, SIG_IGN); // Hydra's word for a rank that has died
  const World world = init({.backend = "mpi"});
  at::Tensor x = at::ones({1'000'000});
  world.group().all_reduce(x, ReduceOp::kMax)->wait();
  if (world.rank() == 1) {
    if (environment("TESSERA_TEST_WHERE") != "inside") {
      raise(SIGKILL);
    }
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      raise(SIGKILL);
    }).detach();
  }
  try {
    while (true) {
      world.group().all_reduce(x, ReduceOp::kMax)->wait();
    }
  } catch (const PeerError& error) {
    std::printf("caught: %s\n", error.what());
    std::fflush(stdout);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    _exit(3);
  }
}

void throw_error() {
  throw std::runtime_error("thrown on purpose");
}

const std::map<std::string, void (*)()>& parts() {
  static const std::map<std::string, void (*)()> all = {
      {"conformance", conformance},
      {"smoke", smoke},
      {"twice", twice},
      {"careless", careless},
      {"stall", stall},
      {"killed", killed},
      {"throw", [] { one_stays_away(throw_error); }},
      {"kill", [] { one_stays_away([] { raise(SIGKILL); }); }},
      {"exit0", [] { one_stays_away([] { std::exit(0); }); }},
      {"exit3", [] { one_stays_away([] { std::exit(3); }); }},
      {"_exit0", [] { one_stays_away([] { _exit(0); }); }}};
  return all;
}

} // namespace
} // namespace tessera

int main(int argc, char** argv) {
  try {
    tessera::parts().at(argc > 1 ? argv[1] : "smoke")();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 4;
  }
  return tessera::failures() == 0 ? 0 : 1;
}
