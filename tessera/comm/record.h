// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
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
  kBarrier
};

// "all_reduce", "reduce_scatter", ...
std::string_view name_of(CollectiveKind kind);

// One collective as this rank saw it.
struct CollectiveEvent {
  CollectiveKind kind;
  std::string axis; // mesh axis name, or "world"
  int64_t bytes; // of the full buffer: the input of all_reduce, reduce_scatter,
                 // all_to_all; the output of all_gather
  double seconds; // blocked in it, issue plus wait
  std::string asker; // the operator or optimizer phase that asked: "mm",
                     // "optimizer.step", "from_local"
};

// The record of every collective that one rank took part in. Thread-safe: a
// backward may run on other threads.
class Record {
 public:
  // Returns a ticket with which the seconds of a later wait can be added.
  uint64_t add(CollectiveEvent event);
  void add_seconds(uint64_t ticket, double seconds);
  // Forgets everything; seconds of collectives still in flight are dropped.
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
  std::vector<CollectiveEvent> events()
      const; // since the last reset, oldest first; bounded, see record.cc

  // {"events": n, "by_kind": {"all_reduce": {"dp": {"count": 3, "bytes": 12,
  // "seconds": 0.1}}}}
  std::string json() const;

 private:
  struct Key {
    CollectiveKind kind;
    std::string axis;
    std::string asker;
    // The check takes the 0 of a defaulted comparison for a pointer.
    // NOLINTNEXTLINE(modernize-use-nullptr)
    auto operator<=>(const Key&) const = default;
  };
  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;
    double seconds = 0;
  };
  Totals sum(
      std::optional<CollectiveKind> kind,
      std::string_view axis,
      std::string_view asker) const;

  mutable std::mutex mutex_;
  std::map<Key, Totals> totals_; // exact, however many events there were
  std::deque<CollectiveEvent> events_;
  uint64_t first_ticket_ = 0; // of events_.front()
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
