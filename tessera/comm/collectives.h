// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>

#include <functional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

// The most tensors that one call lends.
constexpr std::size_t kMaxLent = 2;

// What a backend offers to a Group: the calls of group.h after their arguments
// were checked on this rank (contiguous tensors on the group's device, counts
// that fit, more than one rank). One object per group and rank.
class Collectives {
 public:
  Collectives() = default;
  virtual ~Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  virtual WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) = 0;
  virtual WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) = 0;
  virtual WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) = 0;
  virtual WorkPtr broadcast(const at::Tensor& tensor, int64_t root) = 0;
  virtual WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) = 0;
  virtual WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) = 0;
  virtual WorkPtr barrier() = 0;

  // Backends that cannot lend memory leave these two as they are.
  virtual bool can_lend(std::span<const at::Tensor> /*tensors*/) {
    return false;
  }
  virtual WorkPtr with_peers(
      std::span<const at::Tensor> lent, std::function<void(PeerBuffers)> body);

  // An uninitialised tensor in the memory that this backend moves fastest.
  virtual at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options);
  // What allocates that memory, living as long as the process; null: torch's.
  virtual c10::Allocator* allocator() {
    return nullptr;
  }

  // The same group for calls that return at once and go on beside the program,
  // in the order of all its calls. Backends whose calls always do return
  // themselves.
  virtual Collectives& background() {
    return *this;
  }

  virtual c10::intrusive_ptr<c10d::Backend> backend() = 0;
  // This rank failed: whoever waits for it in this group shall fail too, as
  // soon as the backend can tell them. Any thread.
  virtual void abort(const std::string& reason) = 0;
  // This rank will call nothing more: peers that wait for it fail instead of
  // waiting on.
  virtual void leave() = 0;
};

} // namespace tessera
