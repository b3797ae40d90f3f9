// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct DispatchBenchOptions {
  int64_t calls = 512; // in one timed run
  int64_t runs = 150; // the least is taken
};

// What a distributed operator costs over the plain one on the same local
// tensors, for the operators of a training step, in worlds of one and two
// (ranks as threads, one of them measuring), with and without autograd. Each
// operator rotates through 16 signatures of mixed placements that need no
// communication. Rows: dispatch/<world>/<grad>/<operator>/{plain, distributed,
// difference}, and the median of the differences; microseconds.
std::vector<BenchRow> run_dispatch_bench(
    const DispatchBenchOptions& options = {});

} // namespace tessera
