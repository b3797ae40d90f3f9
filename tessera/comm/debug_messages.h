// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/call_header.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/peer_failure.h>
#include <tessera/comm/world_impl.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace tessera {

// Sends and receives that are compared with their counterparts before any data
// moves. Each call announces itself in the group's store, under its ends, its
// tag and its number among the calls alike. A thread looks for the peer's
// announcement, compares the two and then hands the call to the transport, so
// that nobody has to wait for his own call to let the peer's go on. When two do
// not match, both ends see it. Two that both send, or both receive, are seen at
// the timeout: until then either may still call what the other waits for.
class DebugMessages {
 public:
  struct Message;

  // `transport` outlives this.
  DebugMessages(const GroupSetup& setup, Collectives& transport);
  ~DebugMessages();
  DebugMessages(const DebugMessages&) = delete;
  DebugMessages& operator=(const DebugMessages&) = delete;

  // kSend or kRecv of a tensor in the transport's memory. Returns at once.
  // Throws PeerError when the group is dead.
  WorkPtr start(
      CollectiveKind kind, const at::Tensor& tensor, int64_t peer, int tag);
  // Makes what has not gone to the transport, and all later calls, fail. The
  // first reason stays.
  void die(const std::string& reason);
  std::string dead() const; // why; empty: it is not

 private:
  class Handle; // the Work
  // Shared with the handles, which may outlive the group.
  struct Shared {
    std::mutex mutex; // of all below, and of the messages
    std::condition_variable changed;
    std::deque<std::shared_ptr<Message>> pending; // in the order of the calls
    std::string dead;
    bool stopping = false;
    // MPI that may be called on the program's thread only: the waits post.
    bool waits_post = false;
  };
  using Ends = std::tuple<CollectiveKind, int64_t, int>; // peer and tag

  void run();
  bool look_at(Message& message);
  void compare(const Message& message, const CallCard& theirs) const;
  void post(Message& message);
  void post_matched();
  void fail(Message& message, const std::exception_ptr& error);
  std::exception_ptr explain(
      const Message& message, const std::exception& error) const;
  [[noreturn]] void time_out(Message& message, std::chrono::milliseconds limit);
  WorkPtr hand_over(const Message& message);
  std::string told_by(int64_t rank, const CallCard& card) const;
  std::optional<CallCard> announced(const std::string& key) const;
  int64_t world_rank(int64_t rank) const {
    return world_ranks_[static_cast<std::size_t>(rank)];
  }
  static CollectiveKind opposite(CollectiveKind kind) {
    return kind == CollectiveKind::kSend ? CollectiveKind::kRecv
                                         : CollectiveKind::kSend;
  }
  // Where rank `by` announces its call alike with that number.
  static std::string key_of(
      CollectiveKind kind, int64_t by, int64_t peer, int tag, uint64_t number);

  c10::intrusive_ptr<c10d::Store> group_store_;
  Collectives& transport_;
  int64_t rank_;
  std::vector<int64_t> world_ranks_;
  std::string name_;
  std::string host_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<PeerWatch> peers_;
  PeerFailure failure_;
  uint64_t listener_ = 0;
  std::mutex post_mutex_; // waits post in the order of the calls
  std::mutex start_mutex_; // of what follows; announcements keep their order
  std::map<Ends, uint64_t> numbers_; // of the last call alike
  c10::intrusive_ptr<c10d::Store> store_; // a connection of our own
  std::thread thread_; // both come with the first message
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

} // namespace tessera
