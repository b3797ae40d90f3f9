// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/record.h>
#include <tessera/comm/reduce_op.h>
#include <tessera/comm/shm_messages.h>
#include <tessera/comm/shm_window.h>
#include <tessera/comm/world_impl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// One rank's end of a window: the collectives as blocking calls, the check of
// every call against the peers', and the watch over the peers. shm_backend.cc
// tells the protocol. Calls of several threads of one rank take turns.
class ShmEngine {
 public:
  ShmEngine(std::shared_ptr<ShmWindow> window, const GroupSetup& setup);
  ~ShmEngine();
  ShmEngine(const ShmEngine&) = delete;
  ShmEngine& operator=(const ShmEngine&) = delete;

  // As in group.h, on contiguous tensors. Throw PeerError, TimeoutError.
  void all_reduce(const at::Tensor& tensor, ReduceOp op);
  void reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op);
  void all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts);
  void all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts);
  void broadcast(const at::Tensor& tensor, int64_t root);
  void barrier();

  // Messages from rank to rank. They move while any call of this rank waits, in
  // `finish`, and in `poll`.
  ShmTransferPtr start_send(const at::Tensor& tensor, int64_t peer, int tag);
  ShmTransferPtr start_recv(const at::Tensor& tensor, int64_t peer, int tag);
  bool poll(const ShmTransfer& transfer); // moves what can be moved; whether
                                          // the transfer is done
  void finish(const ShmTransfer& transfer); // blocks until it is done

  // Makes this and all peers' later and waiting calls fail. Any thread.
  void abort(const std::string& reason);
  // Peers that wait for this rank from now on fail.
  void leave();
  uint64_t seq() const {
    return seq_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // The parts of a call, in this order: announce once, then any number of
  // meetings, between which buffers are filled and read.
  void announce(const CallDescription& call);
  void meet();
  uint32_t next_step() const {
    return step_ + 1;
  } // of the coming meeting; its parity chooses the buffers

  void arrive();
  bool reached() const;
  void wait_for_peers();
  void sleep(std::chrono::microseconds limit);
  void watch_message_peer(
      const ShmTransfer& transfer, Clock::time_point waiting_since);
  void watch_peers(Clock::time_point waiting_since);
  bool has_arrived(int64_t rank) const;
  bool is_gone(int64_t rank) const;
  void compare_headers(bool only_arrived);
  void compare_counts_of_pairs();

  void all_reduce_whole(const at::Tensor& tensor, ReduceOp op);
  void all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op);

  std::string where() const;
  std::string who(int64_t rank) const; // "rank 3 (pid 17, host box)"
  [[noreturn]] void fail(FailureKind kind, const std::string& text);
  void publish(FailureKind kind, const std::string& text);
  void throw_if_failed();
  void wake_everyone();

  std::shared_ptr<ShmWindow> window_;
  int64_t rank_;
  int64_t size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  int spins_;
  std::vector<int> pidfds_; // of the peers' processes; -1 for this process
  std::mutex mutex_; // of all below
  ShmMessages messages_;
  std::string_view operation_ = "group"; // the running call, for messages
  uint64_t seq_ = 0;
  uint32_t step_ = 0;
  CallHeader* header_ = nullptr; // of the running call
  bool checked_ = true; // the running call's header against its peers
};

} // namespace tessera
