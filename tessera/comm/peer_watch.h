// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/record.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {

// What one rank tells its world about itself, in memory that outlives it.
struct PeerStatus;

struct PeerWatchOptions {
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank = 0;
  int64_t size = 1;
  std::chrono::milliseconds timeout{};
  std::string machine; // ranks that name the same one can see each other's
                       // processes
};

// A rank's place in the calls of its group, to tell who has stayed behind.
struct CallPlace {
  uint64_t group = 0; // a hash of its id
  uint64_t seq = 0;
};

// Who is behind an error, as far as it can be found out.
struct Culprit {
  int64_t rank = -1; // of the world; -1: nobody in particular
  bool late = false; // it stayed away past the timeout
  std::string text; // "rank 3 (pid 17, host box), last operation all_reduce seq
                    // 12, died; look at its output"
};

// Tells who is behind an error of a backend that only says that a connection
// was closed. Each rank keeps a status in memory of its own that the ranks on
// its machine have mapped: its last operation, whether it has left its world,
// and whether it has failed and whom it held responsible. So the ranks that
// fail because another has failed before them follow the chain to the one who
// began. Processes are watched by pidfds: a thread waits for their end and
// tells the listeners at once, so that nobody waits for a rank that only others
// are connected with. Ranks on other machines are heard of through the store,
// which is written to and asked only after an error.
class PeerWatch {
 public:
  // Collective over the world. Throws TimeoutError, IoError.
  static std::shared_ptr<PeerWatch> open(const PeerWatchOptions& options);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // This rank calls an operation now. Cheap.
  void note(CollectiveKind kind, const CallPlace& place);
  // This rank will call nothing more.
  void leave();
  // This rank has failed by itself: nobody else is to blame.
  void fail(const std::string& reason);

  // After an error among these ranks (of the world). `suspect` is the rank
  // whose connection broke, or -1; `timed_out`: nothing broke, but nothing
  // came. Blocks up to two seconds while nobody can be blamed yet, and
  // publishes what it has found. `place`: the call that failed.
  Culprit find(
      std::span<const int64_t> ranks,
      int64_t suspect,
      bool timed_out,
      const CallPlace& place);

  // The rank has ended, left its world or failed: it will call nothing more.
  // False where that cannot be seen.
  bool is_done(int64_t rank) const;

  // "rank 3 (pid 17, host box), last operation all_reduce seq 12".
  std::string describe(int64_t rank) const;

  // Calls `listener` from a thread of the watch when a rank's process has ended
  // though the rank had not left. Until it is removed; then it is not running
  // either.
  uint64_t add_listener(std::function<void(int64_t rank)> listener);
  void remove_listener(uint64_t id);

 private:
  struct Peer {
    int64_t pid = 0;
    std::string host;
    bool local = false; // on this machine
    int pidfd = -1; // of another process on this machine
    std::shared_ptr<PeerStatus> status; // null: cannot be seen
  };

  explicit PeerWatch(const PeerWatchOptions& options);
  void publish_self(const std::string& machine);
  void meet_peers(const PeerWatchOptions& options);
  void run();
  bool has_ended(const Peer& peer) const;
  std::optional<Culprit> look(
      std::span<const int64_t> ranks, bool timed_out, const CallPlace& place);
  std::optional<Culprit> gone(int64_t rank) const;
  std::optional<Culprit> blamed_by_others(std::span<const int64_t> ranks) const;
  std::optional<Culprit> stayed_behind(
      std::span<const int64_t> ranks, const CallPlace& place) const;
  std::optional<Culprit> told_by_store(std::span<const int64_t> ranks);
  Culprit unheard_of(int64_t suspect) const;
  void publish(const Culprit& culprit);
  const Peer& peer(int64_t rank) const {
    return peers_[static_cast<std::size_t>(rank)];
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
  bool one_machine_ = true;
  int memory_fd_ = -1;
  int stop_fd_ = -1; // an eventfd
  std::shared_ptr<PeerStatus> self_;
  std::mutex publish_mutex_;
  std::vector<Peer> peers_;
  std::mutex listeners_mutex_; // held while they run
  std::map<uint64_t, std::function<void(int64_t)>> listeners_;
  uint64_t next_listener_ = 0;
  std::thread thread_;
};

} // namespace tessera
