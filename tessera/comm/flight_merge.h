// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/flight_record.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// One rank's file.
struct FlightFile {
  std::string path; // for messages
  FlightOwner owner;
  std::string reason; // why it was written
  std::vector<FlightGroup> groups;
  std::vector<FlightCall> calls; // oldest first
};

// Reads what write_flight_file wrote. Every value is checked: sizes, ranks that
// must lie in the world, indices of groups, names. Throws IoError when the file
// cannot be read, CorruptionError when it holds anything else.
FlightFile read_flight_file(const std::string& path);
FlightFile parse_flight(const std::string& path, std::string_view text);

// One rank at the place where the ranks part.
struct FlightPlace {
  int64_t rank; // of the world
  std::string call{}; // "all_reduce(sum) of Float [5]"; empty: it did not call
  std::string asker{};
  std::optional<CallState> state{};
  int64_t start_ns = 0;
  std::string remark{}; // of a rank that did not call: what its file tells
};

// Where the ranks of a group first differ: at one call of all of them.
struct FlightDifference {
  std::string group;
  std::vector<int64_t> world_ranks;
  uint64_t seq = 0;
  std::string what; // "shapes must match", "ranks [2] did not call it", ...
  std::vector<FlightPlace> places; // in the group's order
};

struct FlightReport {
  std::string job;
  int64_t size = 0; // of the world
  std::vector<int64_t> missing; // ranks without a file
  std::vector<std::string> reasons; // "rank 0: ...", one per file
  // At most one per group, the one that began first in front.
  std::vector<FlightDifference> differences;
};

// Compares the ranks' files, in any order. Throws UsageError when they do not
// belong together: other jobs, the same rank twice, no file at all.
FlightReport merge_flights(const std::vector<FlightFile>& files);

} // namespace tessera
