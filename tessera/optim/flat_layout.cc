// SPDX-License-Identifier: Apache-2.0
#include <tessera/optim/flat_layout.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kAlignment = 16; // elements

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

} // namespace

int64_t FlatKind::parts() const {
  int64_t parts = 1;
  for (const FlatCutAxis& cut : cuts) {
    parts *= mesh.size(cut.axis);
  }
  return parts;
}

bool FlatKind::is_first_copy() const {
  return std::ranges::all_of(
      copies, [&](int64_t axis) { return mesh.coordinate(axis) == 0; });
}

FlatKind flat_kind(
    const TensorSpec& parameter,
    const Placements& gradient,
    int64_t sharding_axis) {
  FlatKind kind{parameter.mesh, parameter.dtype, parameter.dtype, {}, {}};
  const auto is_cut = [&](int64_t axis) {
    return gradient[static_cast<size_t>(axis)].is_partial() &&
        kind.mesh.size(axis) > 1;
  };
  const auto add = [&](int64_t axis) {
    kind.cuts.push_back({axis, gradient[static_cast<size_t>(axis)].op()});
  };
  if (sharding_axis >= 0 && is_cut(sharding_axis)) {
    add(sharding_axis);
  }
  for (int64_t axis = 0; axis < kind.mesh.ndim(); ++axis) {
    if (is_cut(axis)) {
      if (axis != sharding_axis) {
        add(axis);
      }
    } else if (
        kind.mesh.size(axis) > 1 &&
        parameter.placements[static_cast<size_t>(axis)].is_replicate()) {
      kind.copies.push_back(axis);
    }
  }
  return kind;
}

FlatRange intersect(const FlatRange& a, const FlatRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

FlatLayout flat_layout(std::span<const int64_t> numels, int64_t parts) {
  FlatLayout layout;
  layout.slots.reserve(numels.size());
  int64_t offset = 0;
  for (const int64_t numel : numels) {
    layout.slots.push_back({offset, offset + numel});
    offset = round_up(offset + numel, kAlignment);
  }
  layout.size = round_up(offset, kAlignment * parts);
  return layout;
}

std::vector<FlatRange> nested_ranges(
    int64_t size, std::span<const GroupPosition> cuts) {
  std::vector<FlatRange> ranges{{0, size}};
  for (const GroupPosition& cut : cuts) {
    const FlatRange& whole = ranges.back();
    const int64_t part = whole.size() / cut.size;
    const int64_t begin = whole.begin + cut.rank * part;
    ranges.push_back({begin, begin + part});
  }
  return ranges;
}

std::vector<size_t> runs_of_bytes(
    std::span<const int64_t> bytes, int64_t limit) {
  std::vector<size_t> runs;
  int64_t filled = 0;
  for (const int64_t size : bytes) {
    if (runs.empty() || filled + size > limit) {
      runs.push_back(0);
      filled = 0;
    }
    ++runs.back();
    filled += size;
  }
  return runs;
}

} // namespace tessera
