// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

// A half-open range of a tensor dim: [offset, offset + size).
struct Chunk {
  int64_t offset;
  int64_t size;
  bool operator==(const Chunk&) const = default;
};

// The part `index` of `parts` that an extent is cut into. Boundaries are
// multiples of `unit`, chunks are ceil(extent / unit / parts) units long and
// the last ones may be short or empty: 10 over 4 is 3,3,3,1; 5 over 4 is
// 2,2,1,0. The one place that knows uneven shards.
Chunk chunk(int64_t extent, int64_t unit, int64_t parts, int64_t index);

// The sizes of all parts.
std::vector<int64_t> chunk_sizes(int64_t extent, int64_t unit, int64_t parts);

} // namespace tessera
