// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/shm_window.h>

#include <span>
#include <string>

namespace tessera {

// A header with its counts, as one rank wrote it.
struct ShmAnnouncement {
  const ShmHeader& header;
  std::span<const int64_t> counts; // what the rank gives, or all ranks' counts
  std::span<const int64_t> out_counts; // what it takes, in an all_to_all
};

// "all_reduce(sum) of Float [100] asked by mm".
std::string describe(const ShmAnnouncement& call);

// What of two calls does not go together: "operations", "dtypes", ...; null
// when they match.
const char* find_mismatch(
    const ShmAnnouncement& mine, const ShmAnnouncement& theirs);

} // namespace tessera
