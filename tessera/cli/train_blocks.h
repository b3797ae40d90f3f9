// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace tessera::cli {

struct TrainPlan;

// What one rank did in a block of steps; times are sums over the block.
struct BlockReport {
  double seconds = 0; // wall time of the block; the next four are parts of it
  double forward_backward = 0;
  double communication = 0; // blocked in it: exposed
  double optimizer = 0; // clipping and update
  double hidden = 0; // communication that went on beside the others
  double loss = 0; // of the last step
  double peak_mib = 0; // largest resident memory of the process so far
};

// The protocol of programs that train when told, ours and the peers that
// `tessera bench train` holds it against: each rank writes a line
// {"parameters": n} when it is ready; every line that it reads holds a number
// of steps, which it runs together with the other ranks, and is answered by a
// line with the fields of BlockReport. At the end of its input it ends.

std::string ready_line(int64_t parameters);
std::string block_line(const BlockReport& report);

// What those lines say. `source` names the rank in errors. Throw IoError.
int64_t parse_ready_line(const std::string& line, const std::string& source);
BlockReport parse_block_line(
    const std::string& line, const std::string& source);

// This rank's side of it. Collective over the job. Throws UsageError for a line
// that is no number of steps.
void train_in_blocks(
    const TrainPlan& plan, std::istream& requests, std::ostream& answers);

} // namespace tessera::cli
