// SPDX-License-Identifier: Apache-2.0
// A program that runs MPI itself, built against each MPI library; the first
// argument says what it does. mpi_test.cc starts it.
#include <ATen/ATen.h>
#include <mpi.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_ranks.h>

#include <cstdio>
#include <map>
#include <string>
#include <thread>

namespace tessera {
namespace {

void sum_of_ranks(const World& world) {
  const at::Tensor x = at::full({1000}, world.rank(), at::kLong);
  world.group().all_reduce(x, ReduceOp::kSum)->wait();
  const int64_t size = world.size();
  expect(x.eq(size * (size - 1) / 2).all().item<bool>(), "sum of ranks");
  std::printf(
      "rank %d of %d over %s\n",
      static_cast<int>(world.rank()),
      static_cast<int>(size),
      world.group().backend_name().c_str());
}

int ranks_of_mpi() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// MPI_Init gives no right to call MPI on other threads.
void one_thread_only(const World& world) {
  const auto future =
      world.group().all_reduce(at::ones({9}), ReduceOp::kSum)->getFuture();
  future->wait();
  expect(!future->hasError(), "future with one thread");
  std::thread([&world] {
    try {
      world.group().barrier();
      expect(false, "a second thread called MPI");
    } catch (const UsageError& error) {
      std::printf("refused: %s\n", error.what());
    }
  }).join();
}

// MPI's world is ours; MPI is the program's to end.
void initialised() {
  MPI_Init(nullptr, nullptr);
  {
    const World world = init({.backend = "mpi"});
    expect(world.size() == ranks_of_mpi(), "size of the world");
    sum_of_ranks(world);
    if (world.size() > 1) {
      one_thread_only(world);
    }
  }
  int finalized = 1;
  MPI_Finalized(&finalized);
  expect(finalized == 0, "MPI goes on after the world has ended");
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
}

// Two halves of the job, in reverse order, each a world of its own.
void handed_over() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  for (const char* backend : {"mpi", "auto"}) {
    const World world =
        init({.backend = backend, .mpi_communicator = MPI_Comm_c2f(half)});
    int expected = 0;
    MPI_Comm_rank(half, &expected);
    expect(world.rank() == expected, "rank in the communicator");
    expect(
        world.size() == (ranks_of_mpi() + 1 - rank % 2) / 2,
        "size of the communicator");
    sum_of_ranks(world);
  }
  MPI_Comm_free(&half);
  MPI_Finalize();
}

// The world is still open when the program ends MPI.
void finalised_first() {
  MPI_Init(nullptr, nullptr);
  const World world = init({.backend = "mpi"});
  sum_of_ranks(world);
  MPI_Finalize();
}

void nobody_hands_over() {
  MPI_Init(nullptr, nullptr);
  try {
    init({.mpi_communicator = MPI_Comm_c2f(MPI_COMM_NULL)});
    expect(false, "MPI_COMM_NULL was taken");
  } catch (const UsageError& error) {
    std::printf("refused: %s\n", error.what());
  }
  MPI_Finalize();
}

} // namespace
} // namespace tessera

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> parts = {
      {"initialised", tessera::initialised},
      {"handed_over", tessera::handed_over},
      {"finalised_first", tessera::finalised_first},
      {"nobody_hands_over", tessera::nobody_hands_over}};
  try {
    parts.at(argc > 1 ? argv[1] : "initialised")();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 4;
  }
  return tessera::failures() == 0 ? 0 : 1;
}
