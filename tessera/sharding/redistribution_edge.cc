// SPDX-License-Identifier: Apache-2.0
#include <c10/core/ScalarType.h>
#include <tessera/base/index.h>
#include <tessera/sharding/redistribution_edge.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tessera {

namespace {

using Kind = RedistributionStep::Kind;

} // namespace

bool TensorMover::cuts_alike(
    const Placements& now, int64_t axis, const Placement& next) const {
  const int64_t dim = next.dim();
  std::vector<int64_t> extents{spec_.sizes[at(dim)]};
  for (int64_t left = 0; left < axis; ++left) {
    if (now[at(left)].is_shard(dim)) {
      std::vector<int64_t> inner;
      for (int64_t extent : extents) {
        const auto sizes =
            chunk_sizes(extent, now[at(left)].unit(), spec_.mesh.size(left));
        inner.insert(inner.end(), sizes.begin(), sizes.end());
      }
      std::sort(inner.begin(), inner.end());
      inner.erase(std::unique(inner.begin(), inner.end()), inner.end());
      extents = std::move(inner);
    }
  }
  const int64_t parts = spec_.mesh.size(axis);
  return std::all_of(extents.begin(), extents.end(), [&](int64_t extent) {
    return chunk_sizes(extent, now[at(axis)].unit(), parts) ==
        chunk_sizes(extent, next.unit(), parts);
  });
}

// The rules of nesting: see redistribution.cc.
bool TensorMover::allowed(
    const Placements& now, int64_t axis, const Placement& next) const {
  const Placement& old = now[at(axis)];
  for (int64_t right = axis + 1; right < spec_.mesh.ndim(); ++right) {
    const Placement& other = now[at(right)];
    if (spec_.mesh.size(right) == 1) {
      continue;
    }
    if (other.is_shard() &&
        (old.is_shard(other.dim()) || next.is_shard(other.dim()))) {
      return false;
    }
    if (other.is_partial() && old.is_partial() &&
        !commute(old.op(), other.op())) {
      return false;
    }
    if (other.is_partial(ReduceOp::kSum) &&
        next.is_partial(ReduceOp::kProduct)) {
      return false;
    }
  }
  return true;
}

std::optional<Kind> TensorMover::kind_between(
    const Placements& now, int64_t axis, const Placement& next) const {
  const Placement& old = now[at(axis)];
  if (old.is_replicate()) {
    return next.is_shard() ? Kind::kSlice : Kind::kToPartial;
  }
  if (old.is_shard()) {
    if (next.is_partial()) {
      return std::nullopt; // by way of Replicate
    }
    if (next.is_replicate()) {
      return Kind::kAllGather;
    }
    const bool alike = old.dim() == next.dim() && cuts_alike(now, axis, next);
    return alike ? Kind::kRelabel : Kind::kAllToAll;
  }
  if (next.is_replicate()) {
    return Kind::kAllReduce;
  }
  if (next.is_shard()) {
    return Kind::kReduceScatter;
  }
  const bool divides = old.is_partial(ReduceOp::kAvg);
  const bool exact =
      !divides || !c10::isIntegralType(spec_.dtype, /*includeBool=*/true);
  if (commute(old.op(), next.op()) && exact) {
    return Kind::kRescale;
  }
  return std::nullopt; // by way of Replicate
}

int64_t TensorMover::bytes(const Placements& placements) const {
  std::vector<int64_t> sizes = spec_.sizes;
  for (int64_t axis = 0; axis < spec_.mesh.ndim(); ++axis) {
    const Placement& placement = placements[at(axis)];
    if (placement.is_shard()) {
      int64_t& size = sizes[at(placement.dim())];
      size = chunk(size, placement.unit(), spec_.mesh.size(axis), 0).size;
    }
  }
  auto total = static_cast<int64_t>(c10::elementSize(spec_.dtype));
  for (int64_t size : sizes) {
    total *= size;
  }
  return total;
}

// Pieces of an outermost dim lie in one run; others are gathered by a copy.
double TensorMover::pack_us(int64_t dim, int64_t bytes) const {
  const auto begin = spec_.sizes.begin();
  const bool outermost =
      std::all_of(begin, begin + dim, [](int64_t size) { return size == 1; });
  return outermost ? 0 : costs_.copy_us(bytes);
}

double TensorMover::cost_us(
    const Placements& now, const Placements& next, const PlanEdge& edge) const {
  const Placement& old = now[at(edge.axis)];
  const auto collective = [&](CollectiveKind kind, int64_t bytes) {
    return costs_.collective_us(spec_.mesh, edge.axis, kind, bytes);
  };
  const int64_t before = bytes(now);
  const int64_t after = bytes(next);
  switch (edge.kind) {
    case Kind::kAllReduce:
      return collective(CollectiveKind::kAllReduce, before);
    case Kind::kReduceScatter:
      return collective(CollectiveKind::kReduceScatter, before) +
          pack_us(edge.placement.dim(), before);
    case Kind::kAllReduceSlice:
      return collective(CollectiveKind::kAllReduce, before) +
          costs_.copy_us(after);
    case Kind::kAllGather:
      return collective(CollectiveKind::kAllGather, after) +
          pack_us(old.dim(), after);
    case Kind::kAllToAll:
      return collective(CollectiveKind::kAllToAll, before) +
          pack_us(edge.placement.dim(), before) + pack_us(old.dim(), after);
    case Kind::kSlice:
    case Kind::kToPartial:
    case Kind::kRescale:
      return costs_.copy_us(after);
    case Kind::kRelabel:
      return 0;
  }
  return 0;
}

std::optional<PlanEdge> TensorMover::edge(
    const Placements& now, int64_t axis, const Placement& next) const {
  const std::optional<Kind> kind = kind_between(now, axis, next);
  if (!kind || !allowed(now, axis, next)) {
    return std::nullopt;
  }
  Placements after = now;
  after[at(axis)] = next;
  const auto priced = [&](Kind k) {
    PlanEdge edge{axis, next, k, 0};
    edge.cost_ns = std::llround(1e3 * cost_us(now, after, edge));
    return edge;
  };
  const PlanEdge first = priced(*kind);
  if (*kind == Kind::kReduceScatter) {
    const PlanEdge second = priced(Kind::kAllReduceSlice);
    return second.cost_ns < first.cost_ns ? second : first;
  }
  return first;
}

} // namespace tessera
