// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

// Whether `part` differs from `whole` only by Replicate axes that became Shard,
// so that a rank's part is a range of what it holds.
bool is_cut_of(const TensorSpec& part, const TensorSpec& whole);

// This rank's range of its local tensor: a view. `part` is a cut of `whole`, or
// of what `whole` is once it is reduced.
at::Tensor cut_local(
    const at::Tensor& local, const TensorSpec& whole, const TensorSpec& part);

// A cut along one mesh axis whose parts lie one after the other in a contiguous
// local tensor, so that one flat collective moves them.
struct FlatCut {
  int64_t axis;
  std::vector<int64_t> counts; // elements of each rank of the axis
};

// The cut from `whole` (Replicate or Partial on the axis) to `part`, if it is
// of that kind: nothing but one axis differs, no other axis shards its dim, and
// the local extents before that dim are 1.
std::optional<FlatCut> flat_cut(
    const TensorSpec& whole, const TensorSpec& part);

} // namespace tessera
