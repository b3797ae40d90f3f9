// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/redistribution.h>

#include <cstdint>
#include <optional>

namespace tessera {

// What one edge of the graph does.
struct PlanEdge {
  int64_t axis;
  Placement placement; // of the axis afterwards
  RedistributionStep::Kind kind;
  int64_t cost_ns;
};

// The tensor whose pieces move, without its placements.
class TensorMover {
 public:
  TensorMover(const TensorSpec& spec, const CostModel& costs)
      : spec_(spec), costs_(costs) {}

  // The edge that gives `axis` another placement; nothing where there is none.
  std::optional<PlanEdge> edge(
      const Placements& now, int64_t axis, const Placement& next) const;

  // Whether two units cut `axis` alike, whatever the axes left of it leave.
  bool cuts_alike(
      const Placements& now, int64_t axis, const Placement& next) const;

 private:
  std::optional<RedistributionStep::Kind> kind_between(
      const Placements& now, int64_t axis, const Placement& next) const;
  bool allowed(
      const Placements& now, int64_t axis, const Placement& next) const;
  double cost_us(
      const Placements& now,
      const Placements& next,
      const PlanEdge& edge) const;
  int64_t bytes(const Placements& placements) const;
  double pack_us(int64_t dim, int64_t bytes) const;

  const TensorSpec& spec_;
  const CostModel& costs_;
};

} // namespace tessera
