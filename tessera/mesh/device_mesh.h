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

// An n-d grid of ranks with named axes, seen from one of its ranks. A cheap
// handle. Two meshes of one world with the same axes, ranks and device are the
// same mesh: they compare equal. What a mesh says about its shape stays
// readable for ever; world() and group() throw UsageError once the world has
// ended, and for a mesh that is only described.
class DeviceMesh {
 public:
  DeviceMesh() = default;
  explicit DeviceMesh(const DeviceMeshImpl* impl) : impl_(impl) {}

  const World& world()
      const; // does not keep the world alive; nor does a copy of it
  int64_t ndim() const;
  int64_t size() const; // ranks in the mesh
  int64_t size(int64_t axis) const;
  const std::vector<Axis>& axes() const;
  int64_t axis_index(
      std::string_view name) const; // throws UsageError that lists the axes
  int64_t coordinate(int64_t axis) const; // of this rank
  const std::vector<int64_t>& coordinates() const;
  const std::vector<int64_t>& ranks() const; // world ranks, row-major
  const Group& group(
      int64_t axis) const; // the ranks that differ from this one only on `axis`
  const Group& group(std::string_view axis) const {
    return group(axis_index(axis));
  }
  const std::string& backend_name(
      int64_t axis) const; // of the axis's group: "shm", "nccl", "single"
  c10::DeviceType device_type() const;
  c10::Device device() const; // this rank's, where its tensors lie
  uint64_t id() const; // unique in the process, never reused
  // This rank's sub-mesh along those axes, in that order; it shares their
  // groups. Not collective. Throws UsageError.
  DeviceMesh submesh(const std::vector<std::string>& axis_names) const;
  std::string str() const; // "mesh(dp=2, tp=4)"

  bool operator==(const DeviceMesh& other) const {
    return impl_ == other.impl_;
  }
  explicit operator bool() const {
    return impl_ != nullptr;
  }
  const DeviceMeshImpl* impl() const {
    return impl_;
  }

 private:
  const DeviceMeshImpl* impl_ = nullptr; // never freed
};

// A mesh over all ranks of the world, row-major. The product of the axis sizes
// must be world.size(); one size may be -1 and is inferred. Collective over the
// world. Meshes of one world may lie on different devices; each has groups of
// its own, whose backend the device chooses. On `cuda` each rank takes the GPU
// of its local rank's number (the only one, if its process sees one), which
// becomes the calling thread's current device. Throws UsageError, also where
// there is no GPU or ranks would share one.
DeviceMesh make_mesh(
    const World& world,
    const std::vector<Axis>& axes,
    c10::DeviceType device = c10::kCPU);

// A mesh without a world: what `rank` of an imagined job would see, for
// planning and for tests of what communicates nothing. Sizes must all be given.
// Each call makes another mesh. Throws UsageError.
DeviceMesh describe_mesh(
    const std::vector<Axis>& axes,
    int64_t rank = 0,
    const std::string& backend_name = "shm",
    c10::DeviceType device = c10::kCPU);

// The axes of a text such as "dp=2,tp=4"; a size may be -1. Throws UsageError.
std::vector<Axis> parse_axes(std::string_view text);

} // namespace tessera
