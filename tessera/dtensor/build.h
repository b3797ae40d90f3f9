// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/ArrayRef.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/placement.h>

#include <torch/nn/module.h>
#include <functional>
#include <memory>
#include <string_view>

namespace tessera {

// Which placements a parameter or buffer gets, by its name as in
// named_parameters and its global shape.
using PlacementFor =
    std::function<Placements(std::string_view name, c10::IntArrayRef sizes)>;

// Runs module constructors so that what they make is born distributed. For
// `build` below.
class BuildScope {
 public:
  explicit BuildScope(const DeviceMesh& mesh);
  ~BuildScope();
  BuildScope(const BuildScope&) = delete;
  BuildScope& operator=(const BuildScope&) = delete;

  // Ends the constructor part and gives every parameter and buffer its
  // placements and values.
  void materialise(
      torch::nn::Module& module, const PlacementFor& placement_for);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Constructs a module whose parameters and buffers are distributed over the
// mesh: Replicate unless `placement_for` says otherwise. Only the shard that a
// rank owns is ever materialised; values are those of a world of one.
// `construct` returns a shared_ptr to a module (or a module holder) and uses
// ordinary torch code. Not collective unless the constructor reads values.
template <typename Construct>
auto build(
    const DeviceMesh& mesh,
    Construct&& construct,
    const PlacementFor& placement_for = {}) {
  BuildScope scope(mesh);
  auto module = construct();
  scope.materialise(*module, placement_for);
  return module;
}

} // namespace tessera
