// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/reduce_op.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Every rank of the axis holds the whole tensor.
struct Replicate {};

// Tensor dim `dim` (negative counts from the end) is cut into chunks whose
// boundaries are multiples of `unit`.
struct Shard {
  explicit Shard(int64_t d, int64_t u = 1) : dim(d), unit(u) {}
  int64_t dim;
  int64_t unit;
};

// Every rank holds a contribution of the full shape; the value is their
// reduction by `op`. Partials of several axes nest like shards do: the right
// axis is reduced first, [P(max), P] is the maximum over the left axis of sums
// over the right one.
struct Partial {
  explicit Partial(ReduceOp o = ReduceOp::kSum) : op(o) {}
  ReduceOp op;
};

// What one mesh axis does to a tensor: Replicate, Shard or Partial.
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kPartial };

  Placement() = default;
  // {Shard(0), Replicate()} is how users write it.
  // NOLINTBEGIN(google-explicit-constructor)
  Placement(Replicate /*unused*/) {}
  Placement(Shard shard)
      : kind_(Kind::kShard), dim_(shard.dim), unit_(shard.unit) {}
  Placement(Partial partial) : kind_(Kind::kPartial), op_(partial.op) {}
  // NOLINTEND(google-explicit-constructor)

  Kind kind() const {
    return kind_;
  }
  bool is_replicate() const {
    return kind_ == Kind::kReplicate;
  }
  bool is_shard() const {
    return kind_ == Kind::kShard;
  }
  bool is_shard(int64_t dim) const {
    return is_shard() && dim_ == dim;
  }
  bool is_partial() const {
    return kind_ == Kind::kPartial;
  }
  bool is_partial(ReduceOp op) const {
    return is_partial() && op_ == op;
  }
  int64_t dim() const {
    return dim_;
  } // of a Shard
  int64_t unit() const {
    return unit_;
  } // of a Shard
  ReduceOp op() const {
    return op_;
  } // of a Partial

  bool operator==(const Placement&) const = default;
  std::string str() const; // "R", "S0", "S0/256", "P", "P(max)"

 private:
  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  int64_t dim_ = 0;
  int64_t unit_ = 1;
};

// Whether reductions of two axes may be done in either order: the same
// operation, or sum and avg.
bool commute(ReduceOp a, ReduceOp b);

// One placement per mesh axis.
using Placements = std::vector<Placement>;

std::string str(const Placements& placements); // "[S0, R]"

} // namespace tessera
