// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/spec_table.h>
#include <tessera/mesh/tensor_spec.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// What a mesh is. Never freed, since specs and with them tensors point to it;
// what it holds of its world (handle and groups) is let go when the world ends,
// by the table of meshes in the world's state.
class DeviceMeshImpl {
 public:
  uint64_t id = 0;
  std::vector<Axis> axes;
  std::vector<int64_t> ranks; // row-major over axes
  std::vector<int64_t> coordinates; // of this rank
  std::vector<std::string> backend_names; // per axis
  c10::Device device = c10::kCPU; // this rank's
  World world; // owns nothing; empty when the world has ended
  std::vector<Group> groups; // per axis; empty when the world has ended
  mutable SpecTable specs;
};

} // namespace tessera
