// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>

#include <vector>

namespace tessera {

// AdamW on 16.7 million float32 parameters, two ranks as threads with one
// thread each, over shm: reduction, update and gather in one pass and in
// separate passes, against the time that their bytes take at the bandwidth of
// a triad that both ranks run at the same time.
std::vector<BenchRow> measure_one_pass();

} // namespace tessera
