// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/record.h>
#include <tessera/comm/reduce_op.h>
#include <tessera/comm/shared_memory.h>
#include <tessera/comm/shm_messages.h>
#include <tessera/comm/shm_window.h>
#include <tessera/comm/world_impl.h>

#include <array>
#include <chrono>
#include <functional>
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
  bool can_lend(std::span<const at::Tensor> tensors) const;
  void with_peers(
      std::span<const at::Tensor> lent,
      const std::function<void(PeerBuffers)>& body);

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
    return window_->member(rank_).calls.load(std::memory_order_acquire);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // A part of a call's data: elements [begin, begin + length) of what each
  // rank gives to each, and the step at which they lie in the window.
  struct Piece {
    int64_t begin;
    int64_t length;
    uint32_t step;
  };

  // This rank reads or writes the others' buffers while the scope lives, unless
  // it ends it before.
  class TouchScope;

  // The parts of a call, in this order: announce once, then any number of
  // meetings, between which buffers are filled and read. `given` is what the
  // others may use in place, if they can; without it, or where they cannot,
  // this rank stages.
  void announce(const CallDescription& call, std::span<const at::Tensor> given);
  void announce(const CallDescription& call, const at::Tensor& given) {
    announce(call, {&given, 1});
  }
  void meet();
  void find_places(
      c10::function_ref<int64_t(int64_t)> bytes_of, std::size_t number = 0);
  uint32_t next_step() const {
    return step_ + 1;
  } // of the coming meeting; its parity chooses the buffers
  bool stages() const {
    return offer_->reach == Reach::kStaged;
  }
  std::byte* place(int64_t rank) const { // null: the rank stages
    return places_[0][static_cast<std::size_t>(rank)];
  }
  void in_pieces(
      int64_t capacity,
      c10::function_ref<int64_t(int64_t)> bytes_of,
      c10::function_ref<int64_t()> longest,
      c10::function_ref<void(const Piece&)> stage,
      c10::function_ref<void(const Piece&)> move);

  ShmOffer offer_for(const at::Tensor& given) const;
  std::byte* reach(
      int64_t rank, const ShmOffer& offer, std::size_t number, int64_t bytes);
  const SharedMemory& memory_of(int64_t rank, const MemoryAddress& place);
  void arrive();
  void wait_for_peers();
  void sleep(int64_t missing, std::chrono::microseconds limit);
  struct Progress {
    bool done;
    uint64_t moved;
  };
  Progress advance(const ShmTransfer& transfer);
  void wake_if_sleeping(int64_t rank) const;
  void pump_messages();
  void pump_messages_for(bool outgoing);
  void watch_message_peer(
      const ShmTransfer& transfer, Clock::time_point waiting_since);
  void watch_peers(Clock::time_point waiting_since);
  bool has_arrived(int64_t rank) const;
  bool is_gone(int64_t rank) const;
  std::string fate_of(int64_t rank) const;
  void check_headers();
  void compare_headers(bool only_arrived);
  void compare_counts_of_pairs();

  void all_reduce_whole(const at::Tensor& tensor, ReduceOp op);
  void all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op);
  struct Part;
  void reduce_part(
      const at::Tensor& tensor, ReduceOp op, const Part& part, uint32_t step);

  std::string where(std::string_view operation) const;
  // "rank 3 (pid 17, host box, last call all_reduce(sum) of Float [4], seq 7)".
  std::string who(int64_t rank) const;
  std::string identity_of(int64_t rank) const; // "rank 3 (pid 17, host box"
  [[noreturn]] void fail(FailureKind kind, const std::string& text);
  [[noreturn]] void give_up(FailureKind kind, const std::string& message);
  void leave_no_reader();
  void publish(FailureKind kind, const std::string& text);
  struct Failure {
    FailureKind kind;
    std::string text;
  };
  std::optional<Failure> published_failure() const;
  void throw_if_failed();
  void wake_everyone();
  // The same for messages, which know nothing of the running call.
  [[noreturn]] void fail_message(
      bool outgoing, FailureKind kind, const std::string& text);
  void throw_if_dead(bool outgoing) const;

  std::shared_ptr<ShmWindow> window_;
  int64_t rank_;
  int64_t size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  int spins_;
  bool one_process_ = true; // all ranks are threads of this process
  std::vector<int> pidfds_; // of the peers' processes; -1 for this process
  std::mutex messages_mutex_; // taken inside of mutex_, never the other way
  ShmMessages messages_;
  std::mutex mutex_; // of all below, for as long as a collective runs
  std::string_view operation_ = "group"; // the running call
  uint64_t seq_ = 0;
  uint32_t step_ = 0;
  CallHeader* header_ = nullptr; // of the running call
  ShmOffer* offer_ = nullptr; // of the running call
  // What the running call lets others use in place.
  std::array<at::Tensor, kMaxLent> given_;
  // Of what the ranks give, where in place.
  std::array<std::vector<std::byte*>, kMaxLent> places_;
  bool all_in_place_ = false;
  bool any_in_place_ = false;
  struct Attached {
    uint64_t nonce;
    std::shared_ptr<SharedMemory> memory;
  };
  std::vector<std::vector<Attached>> attached_; // of each rank's arena
  std::vector<const std::byte*> sources_; // of one reduction
  std::vector<std::byte*> targets_;
  bool checked_ = true; // the running call's header against its peers
};

} // namespace tessera
