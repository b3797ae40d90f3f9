// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/gradient_placements.h>

#include <vector>

namespace tessera {
namespace {

std::vector<bool> free_dims(const TensorSpec& spec) {
  std::vector<bool> is_free;
  for (const int64_t extent : spec.sizes) {
    is_free.push_back(extent > 1);
  }
  for (const Placement& placement : spec.placements) {
    if (placement.is_shard()) {
      is_free[static_cast<size_t>(placement.dim())] = false;
    }
  }
  return is_free;
}

// Takes the first free dim, if any.
Placement next_shard(std::vector<bool>& is_free) {
  for (size_t dim = 0; dim < is_free.size(); ++dim) {
    if (is_free[dim]) {
      is_free[dim] = false;
      return Shard(static_cast<int64_t>(dim));
    }
  }
  return Replicate();
}

} // namespace

Placements all_reduce_gradient(const TensorSpec& gradient) {
  Placements result = gradient.placements;
  for (Placement& placement : result) {
    if (placement.is_partial()) {
      placement = Replicate();
    }
  }
  return result;
}

Placements shard_gradient(const TensorSpec& gradient, int64_t sharding_axis) {
  const int64_t axes = gradient.mesh.ndim();
  if (sharding_axis < -1 || sharding_axis >= axes) {
    throw UsageError(fmt::format(
        "shard_gradient: got axis {}, {} has {}; pass one of its axes",
        sharding_axis,
        gradient.mesh.str(),
        axes));
  }
  Placements result = gradient.placements;
  std::vector<bool> is_free = free_dims(gradient);
  const auto reduce = [&](int64_t axis) {
    Placement& placement = result[static_cast<size_t>(axis)];
    if (placement.is_partial()) {
      placement = gradient.mesh.size(axis) > 1 ? next_shard(is_free)
                                               : Placement(Replicate());
    }
  };
  if (sharding_axis >= 0) {
    reduce(sharding_axis);
  }
  for (int64_t axis = 0; axis < axes; ++axis) {
    reduce(axis);
  }
  return result;
}

} // namespace tessera
