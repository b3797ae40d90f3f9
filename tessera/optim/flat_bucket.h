// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/optim/flat_layout.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace tessera {

// The group that reduces and gathers along a mesh axis.
using AxisGroup = std::function<Group(const DeviceMesh& mesh, int64_t axis)>;

// A parameter's place in a bucket.
struct BucketSlot {
  at::Tensor parameter;
  FlatRange range; // in the flat buffers
  int64_t steps = 0; // updates so far
};

// Parameters and gradients of some parameters in flat buffers, and this rank's
// part of both. Parameters become views of the buffer for ever. A gradient
// comes home, into its place in the buffer, after autograd has made it: by one
// copy, after which `p.grad()` is the place itself, so that further backward
// passes accumulate there. Without cuts (an axis of one rank) nothing is moved,
// and this rank's part is the whole buffer.
class FlatBucket {
 public:
  // `gradient` holds the placements of each parameter's gradients. All of
  // `kind`. Not collective.
  FlatBucket(
      FlatKind kind,
      const std::vector<at::Tensor>& parameters,
      const std::vector<Placements>& gradients,
      const AxisGroup& group);

  // The slot's gradient is in the buffer, or zeros where there is none.
  void bring_home(size_t slot);
  int64_t copies() const { // of gradients that were elsewhere
    return copies_;
  }
  // Brings all home; true if something changed since the last reduction began,
  // or if there was none yet.
  bool is_stale();

  // Starts the reduction of what is home, and completes it. Collective over the
  // groups of the cuts.
  void start_reduction();
  void finish_reduction();
  bool is_in_flight() const {
    return work_ != nullptr || cut_level_ > 0;
  }

  // Brings the updated parts of the parameters to all ranks. Collective.
  void start_gather();
  void finish_gather();

  const FlatKind& kind() const {
    return kind_;
  }
  std::vector<BucketSlot>& slots() {
    return slots_;
  }
  const std::vector<BucketSlot>& slots() const {
    return slots_;
  }
  // The elements that this rank updates.
  FlatRange part() const {
    return ranges_.back();
  }

  // Of a range that lies in this rank's part, flat views: of the parameters,
  // and of the reduced gradients.
  at::Tensor parameters(const FlatRange& range) const;
  at::Tensor gradients(const FlatRange& range) const;

  // Of the buffers that hold reduced gradients beside the unreduced ones.
  int64_t reduced_bytes() const;

 private:
  struct Home {
    at::Tensor view; // in the buffer, shaped as the local tensor
    at::Tensor gradient; // distributed, around the view
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> source;
    int64_t source_version = 0; // of a gradient that stays outside
    bool is_zero = true;
    int64_t reduced_version = -1; // of the view, when a reduction began
  };

  void adopt(const BucketSlot& slot);
  Home make_home(const BucketSlot& slot, const Placements& placements) const;
  bool holds(const Home& home, const at::Tensor& gradient) const;
  void reduce_level(size_t level);
  void gather_level(size_t level);

  FlatKind kind_;
  std::vector<BucketSlot> slots_;
  std::vector<FlatRange> ranges_; // whole, then after each cut
  std::vector<Group> groups_; // of each cut
  at::Tensor values_;
  std::vector<at::Tensor> gradients_; // unreduced, then after each cut
  std::vector<Home> homes_;
  int64_t copies_ = 0;
  WorkPtr work_;
  size_t cut_level_ = 0; // cuts whose reduction has begun
  size_t gather_level_ = 0; // cuts whose gather is left
};

} // namespace tessera
