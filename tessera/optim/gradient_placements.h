// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/tensor_spec.h>

#include <cstdint>

namespace tessera {

// Where gradients go before clip and update, once per step, when states are
// sharded over one mesh axis. Both functions are pure: they depend on the
// gradient's spec only, so all ranks decide alike. Source: PaddlePaddle pull
// requests 72120 and 73997.

// The first fix, fuse_allreduce: every Partial axis becomes Replicate, the
// others stay. [P, S0, P] -> [R, S0, R].
Placements all_reduce_gradient(const TensorSpec& gradient);

// The second fix, fuse_reducescatter: every Partial axis becomes a Shard where
// it can. `sharding_axis` (if Partial) takes the first tensor dim that no axis
// shards and that has more than one element; the remaining Partial axes follow
// in ascending order. Where no such dim is left, or the mesh axis has one rank,
// Partial becomes Replicate. Shard and Replicate axes stay. [P, P] -> [S0, S1]
// for axis 0. This is also where the optimizer's state lives. `sharding_axis`
// -1: no axis goes first. Throws UsageError for an axis the mesh has not.
Placements shard_gradient(const TensorSpec& gradient, int64_t sharding_axis);

} // namespace tessera
