// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/tensor_spec.h>
#include <tessera/sharding/cost_model.h>

#include <cstdint>
#include <vector>

namespace tessera {

// One step of a redistribution: the placement of one mesh axis changes. What
// happens to the local tensor; d is the dim of a Shard, n the size of the axis,
// and `mine` this rank's coordinate on it. Ranges and counts come from
// step_layout() below.
struct RedistributionStep {
  enum class Kind : uint8_t {
    // Partial -> Replicate: the group's all_reduce by the Partial's op.
    kAllReduce,
    // Partial -> Shard(d): cut the local along d as layout.send says, pack the
    // pieces rank after rank, reduce_scatter by the Partial's op
    // with layout.send_counts; the result is this rank's piece.
    kReduceScatter,
    // Shard(d) -> Replicate: all_gather with layout.recv_counts; piece j goes
    // to layout.recv[j] along d of the result.
    kAllGather,
    // Shard -> Shard of another dim or unit: pieces layout.send along send_dim
    // go out, one per rank; what comes from rank j goes to
    // layout.recv[j] along recv_dim of the result (all its other dims are those
    // of the result).
    kAllToAll,
    // Replicate -> Shard(d), local: the range layout.send[mine] along d.
    kSlice,
    // Replicate -> Partial(op), local. avg, min, max: every rank keeps the
    // value. sum: coordinate 0 keeps it, the others hold zeros, so that
    // integers stay exact. product: coordinate 0 keeps it, the others hold
    // ones.
    kToPartial,
    // Partial -> Shard(d): all_reduce, then the range layout.send[mine] along
    // d. Chosen where that is cheaper than reduce_scatter.
    kAllReduceSlice,
    // Partial(sum) -> Partial(avg): the local times n. Partial(avg) ->
    // Partial(sum): the local divided by n (floating dtypes only).
    kRescale,
    // The elements stay where they are: the result is the local viewed with the
    // sizes `to` gives it. Axes of size 1, units that cut alike,
    // tensors without elements.
    kRelabel
  };
  Kind kind;
  int64_t axis;
  // The specs before and after. They differ on `axis` only, but for a tensor
  // without elements, whose one step is a kRelabel from first to last.
  SpecPtr from;
  SpecPtr to;
};

// The steps from one spec to another of the same mesh, sizes and dtype (strides
// are not compared); empty when no placement differs. The last step's `to` is
// `to` itself. Pure, alike on all ranks, least in cost. Throws UsageError for
// specs of different tensors.
std::vector<RedistributionStep> plan_redistribution(
    SpecPtr from, SpecPtr to, const CostModel& costs);

// What the plan costs, in microseconds; makes no specs. `to` must be canonical,
// as in a spec. Cached by the caller where it matters.
double redistribution_us(SpecPtr from, SpecPtr to, const CostModel& costs);
double redistribution_us(
    SpecPtr from, const Placements& to, const CostModel& costs);

// How a step cuts this rank's local tensors; every vector has one entry per
// coordinate on the step's axis, or none where a kind does not use it.
struct StepLayout {
  int64_t send_dim = -1;
  std::vector<Chunk> send; // ranges of the old local along send_dim
  std::vector<int64_t> send_counts; // elements in them
  int64_t recv_dim = -1;
  std::vector<Chunk> recv; // ranges of the new local along recv_dim
  std::vector<int64_t> recv_counts;
};

// Pure. Not for kRelabel, whose layout is empty.
StepLayout step_layout(const RedistributionStep& step);

} // namespace tessera
