// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/reduce_op.h>
#include <tessera/comm/world.h>
#include <tessera/optim/flat_bucket.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace tessera {

// What the ranks are to know together of reduced gradients, beside which of
// them there are. Alike on all ranks.
struct GradientQuestion {
  std::vector<size_t> groups; // of each parameter: norms are by group
  // Of each group: elements count as if cut to [-limit, limit].
  std::vector<double> limits;
  std::optional<double> norm_type;
  bool finite = false; // which gradients have elements that are not
};

// What they know. A norm over all groups is that of the groups' norms.
struct GradientSummary {
  std::vector<bool> present; // some rank has a gradient of the parameter
  std::vector<bool> nonfinite; // some element is infinite or NaN
  std::vector<double> norms; // of each group
  GradientQuestion question; // that was answered
  int64_t reduction = 0; // counts changes of the reduced gradients

  bool answers(const GradientQuestion& other) const;
};

// Each parameter's place in the buckets; none without a gradient so far.
struct GradientPlace {
  const FlatBucket* bucket = nullptr;
  size_t slot = 0;
};

// Puts together what each rank knows: one all_reduce of a number for "changed",
// one per group and one per parameter. `present`: whether this rank has a
// gradient. Adds to `summary.reduction` if `changed` on some rank. Collective
// over the world. Blocks. Throws TimeoutError, PeerError.
void summarize(
    const World& world,
    const GradientQuestion& question,
    std::span<const std::unique_ptr<FlatBucket>> buckets,
    std::span<const GradientPlace> places,
    const std::vector<bool>& present,
    bool changed,
    GradientSummary& summary);

} // namespace tessera
