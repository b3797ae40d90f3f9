// SPDX-License-Identifier: Apache-2.0
// MPI's own collectives of float32, as a C program calls them: rows of JSON for
// `tessera bench collectives --peer`. Start it under mpirun.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace {

using Call = std::function<void()>;

double least_us(const Call& call, long bytes) {
  const long repetitions = std::clamp(1'000'000'000 / (bytes + 1), 10L, 3000L);
  double least = 1e30;
  for (long i = 0; i < repetitions; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - start;
    least = std::min(least, taken.count());
  }
  return least;
}

std::string text_of(long bytes) {
  return bytes >= (1 << 20) ? std::to_string(bytes >> 20) + "MiB"
                            : std::to_string(bytes >> 10) + "KiB";
}

} // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const char* separator = "[\n";
  for (const long bytes :
       {1L << 10, 4L << 10, 64L << 10, 1L << 20, 16L << 20, 64L << 20}) {
    const int part = static_cast<int>(bytes / 4 / size);
    const int numel = part * size;
    std::vector<float> whole(static_cast<std::size_t>(numel), 1.0F);
    std::vector<float> other(whole);
    std::vector<float> own(static_cast<std::size_t>(part), 1.0F);
    const auto row = [&](const char* kind, const Call& call) {
      const double us = least_us(call, bytes);
      if (rank == 0) {
        std::printf(
            "%s  {\"name\": \"%s/%s\", \"value\": %.3f}",
            separator,
            kind,
            text_of(bytes).c_str(),
            us);
        separator = ",\n";
      }
    };
    row("all_reduce", [&] {
      MPI_Allreduce(
          MPI_IN_PLACE,
          whole.data(),
          numel,
          MPI_FLOAT,
          MPI_MAX,
          MPI_COMM_WORLD);
    });
    row("reduce_scatter", [&] {
      MPI_Reduce_scatter_block(
          whole.data(), own.data(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    row("all_gather", [&] {
      MPI_Allgather(
          own.data(),
          part,
          MPI_FLOAT,
          other.data(),
          part,
          MPI_FLOAT,
          MPI_COMM_WORLD);
    });
    row("broadcast",
        [&] { MPI_Bcast(whole.data(), numel, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    row("all_to_all", [&] {
      MPI_Alltoall(
          whole.data(),
          part,
          MPI_FLOAT,
          other.data(),
          part,
          MPI_FLOAT,
          MPI_COMM_WORLD);
    });
  }
  if (rank == 0) {
    std::printf("\n]\n");
  }
  MPI_Finalize();
  return 0;
}
