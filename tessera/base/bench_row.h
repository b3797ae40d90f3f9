// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace tessera {

// One line of a benchmark's result. Every benchmark of the project writes an
// array of these as JSON.
struct BenchRow {
  std::string name; // what was measured: "dispatch/mm/distributed",
                    // "train/kAllReduce/tokens_per_s"
  double value = 0; // in `unit`
  std::string unit; // "us", "tokens/s", "MiB", "count"
  std::string against; // name of the row or peer that `ratio` compares with;
                       // empty: none
  double ratio =
      0; // value / value of `against`; written as null when `against` is empty
};

// [{"name": ..., "value": ..., "unit": ..., "against": ..., "ratio": ...},
// ...], a row a line. Values that are not finite become null.
std::string to_json(const std::vector<BenchRow>& rows);

// Writes the rows to a file, replacing it. Throws IoError.
void write_json(const std::vector<BenchRow>& rows, const std::string& path);

} // namespace tessera
