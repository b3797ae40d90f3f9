// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/call_header.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class CallState : uint8_t { kIssued, kCompleted, kFailed };
std::string_view name_of(CallState state); // "issued", ...

// The counts of a call: how many there are, the first of them, and a hash of
// all.
struct FlightCounts {
  static constexpr std::size_t kKept = 8;

  uint32_t size = 0;
  std::array<int64_t, kKept> first{};
  uint64_t hash = 0;

  static FlightCounts of(std::span<const int64_t> counts);
  std::span<const int64_t> kept() const {
    return {first.data(), std::min<std::size_t>(size, kKept)};
  }
  bool operator==(const FlightCounts&) const = default;
};

// One call of this rank. `header.seq` counts the collectives of the group from
// 1; a send or recv carries that of the collective before it, and its peer as
// the root.
struct FlightCall {
  CallHeader header;
  FlightCounts counts;
  FlightCounts out_counts;
  uint32_t group; // index into the groups
  int32_t tag;
  CallState state;
  int64_t start_ns; // since the epoch in a file, of the steady clock before
  int64_t end_ns; // 0: it has not ended
};

// A group that has called something. Two groups of one name and the same ranks
// differ by their id; it is the same on all ranks of the group.
struct FlightGroup {
  std::string id;
  std::string name;
  std::vector<int64_t> world_ranks;
  uint64_t calls = 0; // collectives so far
};

// Whose calls these are.
struct FlightOwner {
  std::string job; // the same on all ranks of one world, unlike other worlds'
  int64_t rank = 0;
  int64_t size = 1;
  std::string host;
  int64_t pid = 0;
};

// The last calls of one rank, in a ring whose memory is taken at the first
// call. Not thread-safe.
class FlightRecord {
 public:
  static constexpr std::size_t kCalls = 1000;
  using Clock = std::chrono::steady_clock;

  FlightOwner owner;

  uint32_t add_group(FlightGroup group);
  // Returns the call's number, which counts from 0.
  uint64_t begin(
      uint32_t group,
      const CallDescription& call,
      int32_t tag,
      Clock::time_point start);
  // Calls that the ring has forgotten stay so.
  void end(uint64_t number, CallState state, Clock::time_point end);

  const std::vector<FlightGroup>& groups() const {
    return groups_;
  }
  std::vector<FlightCall> calls() const; // oldest first

 private:
  std::vector<FlightGroup> groups_;
  std::vector<FlightCall> ring_;
  uint64_t next_ = 0;
};

// What a rank writes: its owner, groups and calls, as JSON.
std::string flight_json(const FlightRecord& record, std::string_view reason);

// Writes `text` into the folder named by TESSERA_DUMP_DIR, which is made when
// it is not there, else into /tmp/tessera-<user id>, which must belong to this
// user alone and of whose files the newest 1,024 or so stay. The file is
// readable by this user only and replaces an older one of the same rank and
// job. Returns its path. Throws IoError.
std::string write_flight_file(const FlightOwner& owner, std::string_view text);

} // namespace tessera
