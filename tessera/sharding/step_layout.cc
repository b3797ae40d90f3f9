// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/index.h>
#include <tessera/sharding/redistribution.h>

#include <algorithm>
#include <vector>

namespace tessera {

namespace {

using Kind = RedistributionStep::Kind;

// The elements in ranges of one dim of a tensor.
std::vector<int64_t> counts_of(
    const std::vector<int64_t>& sizes,
    int64_t dim,
    const std::vector<Chunk>& ranges) {
  int64_t others = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    others *= d == dim ? 1 : sizes[at(d)];
  }
  std::vector<int64_t> counts;
  counts.reserve(ranges.size());
  for (const Chunk& range : ranges) {
    counts.push_back(others * range.size);
  }
  return counts;
}

// What each of `ranges` has in common with `window`, seen from its start.
std::vector<Chunk> overlaps(
    const std::vector<Chunk>& ranges, const Chunk& window) {
  std::vector<Chunk> result;
  for (const Chunk& range : ranges) {
    const int64_t begin =
        std::clamp(range.offset - window.offset, int64_t{0}, window.size);
    const int64_t end = std::clamp(
        range.offset + range.size - window.offset, int64_t{0}, window.size);
    result.push_back({begin, std::max<int64_t>(end - begin, 0)});
  }
  return result;
}

} // namespace

StepLayout step_layout(const RedistributionStep& step) {
  StepLayout layout;
  if (step.kind == Kind::kRelabel) {
    return layout;
  }
  const Placement& old = step.from->placements[at(step.axis)];
  const Placement& next = step.to->placements[at(step.axis)];
  if (next.is_shard()) {
    layout.send_dim = next.dim();
    layout.send = peer_chunks(step.to, step.axis);
  }
  if (old.is_shard()) {
    layout.recv_dim = old.dim();
    layout.recv = peer_chunks(step.from, step.axis);
  }
  if (old.is_shard() && next.is_shard(old.dim())) {
    const auto mine = at(step.from->mesh.coordinate(step.axis));
    const Chunk old_range = layout.recv[mine];
    const Chunk new_range = layout.send[mine];
    layout.send = overlaps(layout.send, old_range);
    layout.recv = overlaps(layout.recv, new_range);
  }
  if (next.is_shard()) {
    layout.send_counts =
        counts_of(step.from->local_sizes, layout.send_dim, layout.send);
  }
  if (old.is_shard()) {
    layout.recv_counts =
        counts_of(step.to->local_sizes, layout.recv_dim, layout.recv);
  }
  return layout;
}

} // namespace tessera
