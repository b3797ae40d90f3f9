// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>

#include <vector>

namespace tessera {

// What a Group adds to a backend that does nothing: checks, the record and the
// profiler's range, per call.
std::vector<BenchRow> record_rows();

} // namespace tessera
