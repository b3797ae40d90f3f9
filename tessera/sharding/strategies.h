// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/line.h>

#include <cstdint>
#include <vector>

namespace tessera::rules {

// What one mesh axis does to the tensors of a line. Parallel to its operands
// and results.
struct AxisStrategy {
  Placements operands;
  Placements written; // operands after the local computation; only read for
                      // written ones
  Placements results;
  bool contracted = false;
  Letter letter = kWhole; // that is cut, in steps of
  int64_t unit = 1;
};

// The strategies of a line on one mesh axis that are worth a price, as the
// essay in propagate.cc says; the first is to replicate everything (but for
// fresh tensors like a Partial one). Alike on all ranks.
std::vector<AxisStrategy> strategies_of(
    const Line& line, const DeviceMesh& mesh, size_t axis);

} // namespace tessera::rules
