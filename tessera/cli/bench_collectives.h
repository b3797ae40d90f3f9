// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

struct BenchCollectivesOptions {
  int64_t ranks = 2;
  double seconds = 0.3; // of each row
  // NAME=COMMAND: a program that prints JSON rows {"name": "all_reduce/1KiB",
  // "value": us} of the same collectives on as many ranks.
  std::vector<std::string> peers;
  std::string json; // file for the rows; empty: none
  std::string plot; // file for the picture (SVG); empty: none
};

// Measures the collectives of every backend on local processes, which it
// starts; runs the peers one after another; prints tables, with ratios against
// Gloo (Python's where a peer named python_gloo ran, else libtorch's own).
// Returns the exit code. Throws UsageError for a peer that is not
// NAME=COMMAND, IoError for one that fails or prints no rows.
int run_bench_collectives(const BenchCollectivesOptions& options);

// The rows of what a peer printed, named <peer>/<row>. Throws IoError.
std::vector<BenchRow> peer_rows(
    const std::string& peer, const std::string& printed);

// Time over bytes for each backend, a panel per collective, as SVG text. Takes
// rows named <backend>/<collective>/<size>; leaves others out.
std::string collectives_plot(const std::vector<BenchRow>& rows);

} // namespace tessera::cli
