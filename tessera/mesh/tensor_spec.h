// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <tessera/mesh/chunk.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/placement.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// What a distributed tensor is, as all ranks know it: mesh, placements, global
// shape, global strides, dtype. Immutable and interned per world: equal specs
// are the same object, so they compare by pointer. Lives until the process
// ends. Placements are canonical: Shard dims are non-negative; a Shard whose
// unit does not move any boundary, on its axis and whatever the axes left of it
// do, has unit 1.
struct TensorSpec {
  uint64_t id; // unique in the process, never reused
  DeviceMesh mesh;
  Placements placements;
  std::vector<int64_t> sizes; // global
  std::vector<int64_t> strides; // global, in elements
  c10::ScalarType dtype;

  // What this rank holds.
  std::vector<int64_t> local_sizes;
  std::vector<int64_t>
      local_offsets; // of the local tensor's first element in the global one

  // Read often, so computed once.
  int64_t global_numel = 0;
  int64_t local_numel = 0;
  bool replicated = false; // on every axis
  bool partial = false; // on some axis
  bool sharded = false; // on some axis

  int64_t dim() const {
    return static_cast<int64_t>(sizes.size());
  }
  int64_t numel() const {
    return global_numel;
  }
  bool is_replicated() const {
    return replicated;
  }
  bool has_partial() const {
    return partial;
  }
  std::string str() const; // "float32 [4, 6] on mesh(dp=2) placed [S0]"
};

using SpecPtr = const TensorSpec*;

// Replicate on every axis of the mesh.
Placements replicated(const DeviceMesh& mesh);

// The one object for this spec. Thread-safe, not collective. Throws UsageError
// when placements do not fit the mesh or the shape (count, dim range, unit),
// and for sizes whose product overflows.
SpecPtr intern(
    const DeviceMesh& mesh,
    const Placements& placements,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype);

// The same with contiguous strides.
SpecPtr intern_contiguous(
    const DeviceMesh& mesh,
    const Placements& placements,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype);

// The same spec with other placements.
SpecPtr with_placements(SpecPtr spec, const Placements& placements);

// The range of tensor dim `dim` that the rank at the given mesh coordinates
// holds; axes that share a dim nest, the left one outermost.
Chunk local_range(
    const TensorSpec& spec,
    int64_t dim,
    const std::vector<int64_t>& coordinates);

// How `axis`, which must be Shard, cuts its dim: the range of every coordinate
// on the axis, relative to the start of the range that the axes left of it
// leave to this rank. The sizes add up to that range's size.
std::vector<Chunk> peer_chunks(SpecPtr spec, int64_t axis);

} // namespace tessera
