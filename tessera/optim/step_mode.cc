// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/step_mode.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tessera {

FlatShard StepMode::reduced_shard(const at::Tensor& /*parameter*/) const {
  throw UsageError(
      "reduced_shard: got a mode without flat buffers, expected kBucketed; use "
      "reduced_gradient");
}

void StepMode::unscale(double /*scale*/) {
  throw UsageError(
      "GradScaler: got a mode without flat buffers, expected kBucketed; use "
      "that, or bfloat16, which needs no scaling");
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

const torch::optim::OptimizerParamGroup* group_of(
    const ParamGroups& groups, const at::Tensor& parameter) {
  for (const auto& group : groups) {
    for (const at::Tensor& each : group.params()) {
      if (each.is_same(parameter)) {
        return &group;
      }
    }
  }
  return nullptr;
}

void require_fitting_state(
    UpdateRule rule,
    const ParamOptions& options,
    const at::Tensor& parameter,
    const ParameterState& state) {
  const std::vector<StateField> fields = state_fields(rule, options);
  std::vector<std::string> expected;
  expected.reserve(fields.size());
  for (const StateField& field : fields) {
    expected.emplace_back(field.name);
  }
  std::ranges::sort(expected);
  std::vector<std::string> got;
  for (const auto& [name, tensor] : state.tensors) {
    if (name != kMasterWeight) { // any optimizer may have them or not
      got.push_back(name);
    }
    if (tensor.sizes() != parameter.sizes()) {
      throw UsageError(fmt::format(
          "load_state_dict: got {} of sizes [{}], expected the parameter's "
          "[{}]; load the state of the same model",
          name,
          fmt::join(tensor.sizes(), ", "),
          fmt::join(parameter.sizes(), ", ")));
    }
  }
  if (got != expected) {
    throw UsageError(fmt::format(
        "load_state_dict: got the fields [{}], expected [{}]; use the "
        "optimizer and the options that the state was saved from",
        fmt::join(got, ", "),
        fmt::join(expected, ", ")));
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
