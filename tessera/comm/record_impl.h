// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/flight_record.h>
#include <tessera/comm/record.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {

// What a Record holds, and what a Group tells it about a call: begin, then
// issued or failed, then perhaps waited or failed.
class RecordImpl {
 public:
  using Clock = FlightRecord::Clock;

  // A call between its begin and its end.
  struct Ticket {
    uint64_t call = 0;
    uint64_t event = 0;
  };

  void set_owner(FlightOwner owner);
  uint32_t add_group(FlightGroup group);

  Ticket begin(
      uint32_t group,
      const CallDescription& call,
      int32_t tag,
      Clock::time_point start);
  // The backend has taken the call; `done`: there is nothing to wait for.
  void issued(
      Ticket& ticket,
      uint32_t group,
      CollectiveKind kind,
      int64_t bytes,
      Clock::time_point start,
      bool done);
  // `busy`: seconds that a thread beside the program worked on it, 0: none did.
  // `done`: the call has ended by that.
  void waited(
      const Ticket& ticket, Clock::time_point start, double busy, bool done);
  void ended(const Ticket& ticket, CallState state);
  // Returns a sentence that names the file to which this rank's calls were
  // written. Calls that fail soon after another write no other file.
  std::string failed(const Ticket& ticket, const std::string& reason);

  uint64_t add(
      CollectiveKind kind,
      std::string_view axis,
      std::string_view asker,
      int64_t bytes,
      double seconds,
      Clock::time_point start);
  void add_seconds(uint64_t event, double seconds);
  void reset();

  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;
    double seconds = 0;
  };
  Totals sum(
      std::optional<CollectiveKind> kind,
      std::string_view axis,
      std::string_view asker) const;
  // How long threads beside the program worked on calls that were waited for,
  // less how long the program was blocked in waiting for these: communication
  // that was hidden, once all is waited for. Below 0 if it only waited.
  double hidden_seconds() const;
  std::vector<CollectiveEvent> events() const;
  std::string json() const;
  std::string chrome_trace() const;
  std::string write_calls(const std::string& reason) const;

 private:
  struct KeyView {
    CollectiveKind kind;
    std::string_view axis;
    std::string_view asker;
  };
  struct Key {
    CollectiveKind kind;
    std::string axis;
    std::string asker;
  };
  struct KeyLess {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return view(a) < view(b);
    }
    template <typename K>
    static std::tuple<CollectiveKind, std::string_view, std::string_view> view(
        const K& key) {
      return {key.kind, key.axis, key.asker};
    }
  };
  using AllTotals = std::map<Key, Totals, KeyLess>;
  struct Event {
    AllTotals::value_type* totals; // and its key
    int64_t bytes;
    double seconds;
    Clock::time_point start;
  };

  uint64_t add_locked(
      const KeyView& key,
      int64_t bytes,
      double seconds,
      Clock::time_point start);
  void add_seconds_locked(uint64_t event, double seconds);
  template <typename Visit>
  void visit_events(const Visit& visit) const; // oldest first

  mutable std::mutex mutex_; // of all below
  FlightRecord flight_;
  AllTotals totals_; // exact, however many events there were
  std::vector<Event> events_; // a ring once it is full
  double hidden_seconds_ = 0;
  uint64_t first_event_ = 0; // number of the oldest that is kept
  uint64_t next_event_ = 0;
  std::string failed_file_; // or why there is none
  Clock::time_point failed_at_;
};

} // namespace tessera
