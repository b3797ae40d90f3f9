// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/step_mode.h>

#include <algorithm>

namespace tessera {

FlatShard StepMode::reduced_shard(const at::Tensor& /*parameter*/) const {
  throw UsageError(
      "reduced_shard: got a mode without flat buffers, expected kBucketed; use "
      "reduced_gradient");
}

int64_t find_axis(const DeviceMesh& mesh, const std::string& name) {
  const auto& axes = mesh.axes();
  const auto found = std::ranges::find(axes, name, &Axis::name);
  return found == axes.end() ? -1 : found - axes.begin();
}

void require_distributed(const at::Tensor& tensor, const char* what) {
  if (!is_dtensor(tensor)) {
    throw UsageError(fmt::format(
        "shard_optimizer: got a plain {}, expected distributed ones; make the "
        "model with tessera::build",
        what));
  }
}

World world_of(const ParamGroups& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& param : group.params()) {
      return spec_of(param)->mesh.world();
    }
  }
  return {};
}

} // namespace tessera
