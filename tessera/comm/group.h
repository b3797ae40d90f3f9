// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/record.h>
#include <tessera/comm/reduce_op.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace c10d {
class Backend;
}

namespace tessera {

class GroupImpl;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// buffers[i][rank]: where, in this process, what that rank lends as its i-th
// begins. Valid until the function that gets them returns.
using PeerBuffers = std::span<const std::span<std::byte* const>>;

// An ordered set of ranks and their collectives. A cheap handle; copies mean
// the same group. Every call is collective over the group: all its ranks call
// it in the same order with matching shapes and dtypes. A call returns a Work
// at once or when it is done, as the backend can; `wait()` throws TimeoutError
// or PeerError. Tensors must be contiguous and stay alive and untouched until
// the Work is waited for. A group of one moves nothing.
class Group {
 public:
  Group() = default;
  explicit Group(std::shared_ptr<GroupImpl> impl, bool in_background = false)
      : impl_(std::move(impl)), in_background_(in_background) {}

  int64_t rank() const; // of this process or thread inside the group
  int64_t size() const;
  const std::string& name()
      const; // the mesh axis that the group serves, or "world"
  const std::vector<int64_t>& world_ranks() const;
  const std::string& backend_name()
      const; // "shm", "gloo", "mpi", "nccl", or "single" for one
  c10::Device device() const; // where the tensors of its calls lie
  c10::intrusive_ptr<c10d::Backend> backend() const;

  // The same group for calls that return at once and go on beside the program,
  // on backends (shm) whose calls else do their work before they return: for
  // overlapping communication with computation. Costs a thread and a hand-over
  // per call. The Work must be waited for before its tensors are used or freed.
  // Calls of both kinds keep the order in which the program makes them.
  Group background() const;

  // An uninitialised, contiguous CPU tensor in the memory that this group's
  // backend moves fastest; over shm, peers then read and write it in place
  // instead of through copies. For large buffers that live long: each takes at
  // least a page. Not collective. Throws IoError when there is no room.
  at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options = {}) const;

  // `tensor` becomes the reduction over all ranks.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) const;
  // `in` holds sum(counts) elements, rank after rank; `out` receives this
  // rank's counts[rank()] reduced elements.
  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) const;
  // `in` holds counts[rank()] elements; `out` receives all ranks' elements,
  // rank after rank.
  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) const;
  // `in` holds what goes to each rank, rank after rank; `out` what comes from
  // each.
  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) const;
  WorkPtr broadcast(const at::Tensor& tensor, int64_t root)
      const; // root: rank inside the group
  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag = 0) const;
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag = 0) const;
  WorkPtr barrier() const;

  // Whether this rank can lend these: over shm, what `allocate` made, or
  // anything where all ranks are threads of one process. Not collective.
  bool can_lend(std::span<const at::Tensor> tensors) const;

  // One pass over the memory of all ranks: lends one or two tensors, of the
  // same sizes in bytes on every rank, and calls `body` once every rank has.
  // Ends when the bodies of all ranks have, so they divide the bytes among
  // themselves: what one writes no other may read or write. No collective of
  // this group is called in a body, which runs on the background's thread where
  // that was asked for. A body that throws ends the group, as the death of a
  // rank does: PeerError on the others. Throws UsageError on all ranks, the
  // group going on, when one cannot lend its tensors.
  WorkPtr with_peers(
      std::span<const at::Tensor> lent,
      std::function<void(PeerBuffers)> body) const;

 private:
  std::shared_ptr<GroupImpl> impl_;
  bool in_background_ = false;
};

} // namespace tessera
