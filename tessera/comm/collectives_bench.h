// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>
#include <tessera/comm/world.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct CollectivesBenchOptions {
  std::vector<int64_t> sizes = {
      1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}; // bytes
  // Time in one row, about: the least of that many repetitions is taken.
  double seconds = 0.3;
};

// Microseconds of each collective of float32 over each backend that the ranks
// of `world` can have, by the bytes of the full buffer, through the c10d
// interface (gloo: through the group). Collective over the world. Rows, alike
// on all ranks in name and on rank 0 in value:
//   <backend>/<collective>/<size>       buffers from Group::allocate
//   <backend>_plain/<collective>/<size> buffers of torch's allocator
//   c10d_gloo/<collective>/<size>       libtorch's own collectives over Gloo
//   memory/{memcpy,triad}/{one core,all cores}  GB/s
//   shm/<collective>/64MiB/of triad     GB/s: the bytes that must move, over
//   the
//                                       time; against the triad of all cores
std::vector<BenchRow> run_collectives_bench(
    const World& world, const CollectivesBenchOptions& options = {});

// 65536 -> "64KiB".
std::string text_of_bytes(int64_t bytes);

} // namespace tessera
