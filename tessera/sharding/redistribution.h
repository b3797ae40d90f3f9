// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/tensor_spec.h>
#include <tessera/sharding/cost_model.h>

#include <cstdint>
#include <vector>

namespace tessera {

// One step of a redistribution: the placement of one mesh axis changes.
struct RedistributionStep {
  enum class Kind : uint8_t {
    kAllReduce, // Partial -> Replicate
    kReduceScatter, // Partial -> Shard
    kAllGather, // Shard -> Replicate
    kAllToAll, // Shard -> Shard of another dim or unit
    kSlice, // Replicate -> Shard, local
    kToPartial, // Replicate -> Partial, local
    kAllReduceSlice, // Partial -> Shard as all_reduce then slice, where that is cheaper
    kRescale // Partial(sum) <-> Partial(avg), local
  };
  Kind kind;
  int64_t axis;
  SpecPtr from; // specs before and after; they differ on `axis` only
  SpecPtr to;
};

// The steps from one spec to another of the same mesh, shape and dtype; empty when nothing is to be done. Pure. Steps on axes of size 1 are
// local. Chosen by cost: n-d nested shards are unwound from the innermost axis, dims that do not change are not gathered.
std::vector<RedistributionStep> plan_redistribution(SpecPtr from, SpecPtr to, const CostModel& costs);

// What the plan costs, in microseconds. Cached by the caller where it matters.
double redistribution_us(SpecPtr from, SpecPtr to, const CostModel& costs);

} // namespace tessera
