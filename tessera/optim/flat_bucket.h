// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/optim/bucket_gradients.h>
#include <tessera/optim/flat_layout.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera {

// The group that reduces and gathers along a mesh axis.
using AxisGroup = std::function<Group(const DeviceMesh& mesh, int64_t axis)>;

// How a bucket treats unreduced gradients.
using MakeGradients = std::function<std::unique_ptr<BucketGradients>(
    const std::vector<BucketSlot>& slots, int64_t size, const Group* group)>;

// Some parameters in a flat buffer, and this rank's part of it and of their
// reduced gradients. The parameters become views of the buffer for ever.
// Without cuts (an axis of one rank) nothing is moved, and this rank's part is
// the whole buffer.
class FlatBucket {
 public:
  // All parameters are of `kind`; `gradients` are the placements of their
  // gradients. Not collective.
  FlatBucket(
      FlatKind kind,
      const std::vector<at::Tensor>& parameters,
      const std::vector<Placements>& gradients,
      const AxisGroup& group,
      const MakeGradients& make_gradients);

  BucketGradients& gradients() {
    return *unreduced_;
  }
  const BucketGradients& gradients() const {
    return *unreduced_;
  }
  // Takes all gradients; true if something changed since the last reduction
  // began, or if there was none yet.
  bool is_stale();

  // Starts the reduction of the gradients, and completes it. Collective over
  // the groups of the cuts.
  void start_reduction();
  void finish_reduction();

  // Brings the updated parts of the parameters to all ranks. Collective.
  void start_gather();
  void finish_gather();

  // Whether the peers of the only cut can read unreduced gradients and write
  // parameters where they lie.
  bool is_lendable() const;
  // Starts what does the work of reduction, update and gather by itself;
  // finish_gather completes it. Of a lendable bucket.
  using OnePass = std::function<WorkPtr(
      const Group& group,
      const at::Tensor& gradients,
      const at::Tensor& parameters,
      bool average)>;
  void start_one_pass(const OnePass& one_pass);

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
  at::Tensor reduced(const FlatRange& range) const;

  // Of the buffers that hold reduced gradients beside the unreduced ones.
  int64_t reduced_bytes() const;

 private:
  void adopt(const BucketSlot& slot);
  void reduce_level(size_t level);
  void add_incoming();
  void gather_level(size_t level);

  FlatKind kind_;
  std::vector<BucketSlot> slots_;
  std::vector<FlatRange> ranges_; // whole, then after each cut
  std::vector<Group> groups_; // of each cut
  at::Tensor values_;
  std::vector<at::Tensor> reduced_; // unreduced, then after each cut
  at::Tensor incoming_; // what is added to the last of them
  std::unique_ptr<BucketGradients> unreduced_;
  bool is_in_flight_ = false;
  WorkPtr work_;
  size_t cut_level_ = 0; // cuts whose reduction has begun
  size_t gather_level_ = 0; // cuts whose gather is left
};

} // namespace tessera
