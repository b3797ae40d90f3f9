// SPDX-License-Identifier: Apache-2.0
#include <tessera/mesh/chunk.h>

#include <algorithm>

namespace tessera {

namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + static_cast<int64_t>(a % b != 0);
}

} // namespace

Chunk chunk(int64_t extent, int64_t unit, int64_t parts, int64_t index) {
  const int64_t units_per_part = ceil_div(ceil_div(extent, unit), parts);
  // Past the end before the products can overflow: all later parts are empty.
  if (index > 0 && units_per_part > extent / unit / index) {
    return {extent, 0};
  }
  const int64_t offset = index * units_per_part * unit;
  const int64_t left = extent - offset;
  const bool fits = units_per_part <= left / unit;
  return {offset, fits ? units_per_part * unit : left};
}

std::vector<int64_t> chunk_sizes(int64_t extent, int64_t unit, int64_t parts) {
  std::vector<int64_t> sizes(static_cast<size_t>(parts));
  for (int64_t i = 0; i < parts; ++i) {
    sizes[static_cast<size_t>(i)] = chunk(extent, unit, parts, i).size;
  }
  return sizes;
}

} // namespace tessera
