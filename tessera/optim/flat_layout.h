// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/reduce_op.h>
#include <tessera/mesh/tensor_spec.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// A mesh axis along which gradients are reduced and flat buffers are cut.
struct FlatCutAxis {
  int64_t axis;
  ReduceOp op;
  bool operator==(const FlatCutAxis&) const = default;
};

// What the parameters of one flat buffer have in common.
struct FlatKind {
  DeviceMesh mesh;
  c10::ScalarType dtype;
  c10::ScalarType
      gradient_dtype; // that gradients accumulate and are reduced in
  // Where gradients are Partial and the axis has several ranks: the sharding
  // axis first, the others in ascending order. Each cuts what the one before it
  // left.
  std::vector<FlatCutAxis> cuts;
  // Other axes of several ranks on which the parameters are Replicate.
  std::vector<int64_t> copies;

  // Parts that the buffer is cut into.
  int64_t parts() const;
  // Whether a norm counts this rank's copy: the first.
  bool is_first_copy() const;
  bool operator==(const FlatKind&) const = default;
};

// Of a parameter and the placements of its gradients: the parameter's own, with
// Partial(sum) or Partial(avg) in place of some Replicate. `sharding_axis` is
// -1 where the mesh lacks it. The gradients' dtype is the parameter's.
FlatKind flat_kind(
    const TensorSpec& parameter,
    const Placements& gradient,
    int64_t sharding_axis);

// A range of elements of a flat buffer.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const {
    return end - begin;
  }
  bool operator==(const FlatRange&) const = default;
};

// What both ranges cover; empty ranges have size 0.
FlatRange intersect(const FlatRange& a, const FlatRange& b);

// Where each tensor lies in a flat buffer that can be cut into equal parts.
// Tensors begin at multiples of 16 elements, so that they are aligned to 64
// bytes from float32 on.
struct FlatLayout {
  std::vector<FlatRange> slots;
  int64_t size = 0; // a multiple of 16 * parts
};
FlatLayout flat_layout(std::span<const int64_t> numels, int64_t parts);

// The part of a rank: of each cut's group, its size and this rank in it,
// outermost first. Returns what is left after each cut, beginning with the
// whole buffer.
struct GroupPosition {
  int64_t size;
  int64_t rank;
};
std::vector<FlatRange> nested_ranges(
    int64_t size, std::span<const GroupPosition> cuts);

// Cuts a list of tensors into runs of neighbours of at most `limit` bytes, or
// of one tensor that is larger. Returns how many each run has.
std::vector<size_t> runs_of_bytes(
    std::span<const int64_t> bytes, int64_t limit);

} // namespace tessera
