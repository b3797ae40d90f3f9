// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <tessera/comm/world.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// One named dimension of a mesh.
struct Axis {
  std::string name;
  int64_t size;
};

class DeviceMeshImpl;

// An n-d grid of ranks with named axes, seen from one of its ranks. A cheap handle. Two meshes of one world with the same axes, ranks and
// device are the same mesh: they compare equal.
class DeviceMesh {
 public:
  DeviceMesh() = default;
  explicit DeviceMesh(const DeviceMeshImpl* impl) : impl_(impl) {}

  const World& world() const;
  int64_t ndim() const;
  int64_t size() const; // ranks in the mesh
  int64_t size(int64_t axis) const;
  const std::vector<Axis>& axes() const;
  int64_t axis_index(std::string_view name) const; // throws UsageError that lists the axes
  int64_t coordinate(int64_t axis) const; // of this rank
  const std::vector<int64_t>& coordinates() const;
  const std::vector<int64_t>& ranks() const; // world ranks, row-major
  const Group& group(int64_t axis) const; // the ranks that differ from this one only on `axis`
  const Group& group(std::string_view axis) const { return group(axis_index(axis)); }
  c10::DeviceType device_type() const;
  uint64_t id() const; // unique in the process, never reused
  DeviceMesh submesh(const std::vector<std::string>& axis_names) const; // this rank's sub-mesh along those axes
  std::string str() const; // "mesh(dp=2, tp=4)"

  bool operator==(const DeviceMesh& other) const { return impl_ == other.impl_; }
  explicit operator bool() const { return impl_ != nullptr; }
  const DeviceMeshImpl* impl() const { return impl_; }

 private:
  const DeviceMeshImpl* impl_ = nullptr; // lives as long as its world
};

// A mesh over all ranks of the world, row-major. The product of the axis sizes must be world.size(); one size may be -1 and is inferred.
// Collective over the world. Throws UsageError.
DeviceMesh make_mesh(const World& world, const std::vector<Axis>& axes, c10::DeviceType device = c10::kCPU);

} // namespace tessera
