// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier,
  kWithPeers // a function over the peers' own memory
};

constexpr auto kLastCollective = CollectiveKind::kWithPeers;

// "all_reduce", "reduce_scatter", ...
std::string_view name_of(CollectiveKind kind);

// One collective as this rank saw it.
struct CollectiveEvent {
  CollectiveKind kind;
  std::string axis; // mesh axis name, or "world"
  int64_t bytes; // of the full buffer: the input of all_reduce, reduce_scatter,
                 // all_to_all; the output of all_gather; what with_peers
                 // lends
  double seconds; // blocked in it, issue plus wait
  std::string asker; // the operator or optimizer phase that asked: "mm",
                     // "optimizer.step", "from_local"
};

class RecordImpl;

// The record of every collective that one rank took part in: exact sums, single
// events, and the last 1,000 calls with all that they were called with.
// Thread-safe: a backward may run on other threads.
class Record {
 public:
  Record();
  ~Record();
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // Returns a ticket with which the seconds of a later wait can be added.
  uint64_t add(const CollectiveEvent& event);
  void add_seconds(uint64_t ticket, double seconds);
  // Forgets sums and events, not the last calls; seconds of collectives still
  // in flight are dropped.
  void reset();

  // Sums over all events that match; an empty axis or asker matches all.
  int64_t count(
      CollectiveKind kind,
      std::string_view axis = {},
      std::string_view asker = {}) const;
  int64_t bytes(
      CollectiveKind kind,
      std::string_view axis = {},
      std::string_view asker = {}) const;
  int64_t total_count() const;
  double seconds() const;
  // Since the last reset, oldest first; the last 65,536.
  std::vector<CollectiveEvent> events() const;

  // {"events": n, "by_kind": {"all_reduce": {"dp": {"count": 3, "bytes": 12,
  // "seconds": 0.1}}}}
  std::string json() const;

  // The events as a trace that chrome://tracing and Perfetto open: one process
  // per rank, one track per axis, times of the wall clock. A collective that
  // was waited for later is as long as the time that was blocked in it.
  std::string chrome_trace() const;

  // Writes this rank's last 1,000 calls to a file that `tessera comm dump`
  // compares with the other ranks', and returns its path. It lies in the folder
  // TESSERA_DUMP_DIR, or else in /tmp/tessera-<user id>, and is readable by its
  // owner only; a later one replaces it. Every rank whose collective fails or
  // times out writes it by itself. `reason` becomes part of it. Any thread, not
  // collective. Throws IoError.
  std::string write_calls(const std::string& reason = "asked for") const;

  RecordImpl& impl() const {
    return *impl_;
  }

 private:
  std::unique_ptr<RecordImpl> impl_;
};

// Names who asks for the collectives that this thread issues while the scope
// lives. `name` must outlive the scope. Scopes nest; the innermost wins.
class AskerScope {
 public:
  explicit AskerScope(const char* name);
  ~AskerScope();
  AskerScope(const AskerScope&) = delete;
  AskerScope& operator=(const AskerScope&) = delete;
  static const char* current();

 private:
  const char* previous_;
};

} // namespace tessera
