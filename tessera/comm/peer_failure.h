// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/world_impl.h>

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace tessera {

// The call that failed.
struct FailedCall {
  std::string where; // begins the message
  uint64_t seq = 0;
  int64_t suspect = -1; // inside the group: whose transfer broke
  bool message = false; // a send or recv, which only the suspect answers
};

// Turns what a backend of libtorch threw into an error of ours that names who
// is behind it. One per group; it outlives the group where messages of it do.
// Thread-safe.
class PeerFailure {
 public:
  // `backend`: whose words are quoted, "gloo".
  PeerFailure(const GroupSetup& setup, std::string backend);

  // TimeoutError or PeerError. May block for two seconds, see PeerWatch::find.
  std::exception_ptr explain(
      const FailedCall& call, const std::exception& error) const;
  // Who is behind the end of this rank (of the world), which the watch told.
  std::string end_of(int64_t world_rank) const;
  bool in_group(int64_t world_rank) const;
  void note(CollectiveKind kind, uint64_t seq) const;

  // Sends and receives that may have to be stopped.
  void add_message(c10d::Work* work);
  void remove_message(c10d::Work* work);
  void stop_messages(const std::string& reason);
  std::string stopped() const; // why; empty: they were not

 private:
  std::shared_ptr<PeerWatch> peers_;
  std::vector<int64_t> world_ranks_;
  uint64_t group_;
  std::string backend_;
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_; // of all below
  std::set<c10d::Work*> messages_;
  std::string stopped_;
};

// Not every kind of work can be stopped; those end by their timeout.
void stop_transfer(c10d::Work& transfer);

std::string message_of(const std::exception_ptr& error);

} // namespace tessera
