// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
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
  int64_t bytes; // of the full buffer: the input of all_reduce, reduce_scatter, all_to_all; the output of all_gather
  double seconds; // blocked in it, issue plus wait
  std::string asker; // the operator or optimizer phase that asked: "mm", "optimizer.step", "from_local"
};

// The record of every collective that one rank took part in. Thread-safe: a backward may run on other threads.
class Record {
 public:
  void add(CollectiveEvent event);
  void reset();

  // Sums over all events that match; an empty axis or asker matches all.
  int64_t count(CollectiveKind kind, std::string_view axis = {}, std::string_view asker = {}) const;
  int64_t bytes(CollectiveKind kind, std::string_view axis = {}, std::string_view asker = {}) const;
  int64_t total_count() const;
  double seconds() const;
  std::vector<CollectiveEvent> events() const; // since the last reset, oldest first; bounded, see record.cc

  // {"events": n, "by_kind": {"all_reduce": {"dp": {"count": 3, "bytes": 12, "seconds": 0.1}}}}
  std::string json() const;
};

// Names who asks for the collectives that this thread issues while the scope lives. `name` must outlive the scope.
// Scopes nest; the innermost wins.
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
