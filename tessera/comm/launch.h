// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

enum class LaunchOutput {
  // Every line of every rank begins with "[rank] ".
  kPrefixed,
  // Rank 0 writes to the launcher's own streams, so that it sees a terminal.
  // What the others write to standard output is dropped; the end of their
  // standard error is shown when they fail.
  kRankZeroOnly,
};

struct LaunchOptions {
  std::vector<std::string> command =
      {}; // program (searched in PATH) and arguments
  int64_t ranks = 1;
  LaunchOutput output = LaunchOutput::kPrefixed;
  std::vector<std::pair<std::string, std::string>> environment =
      {}; // besides ours
  std::chrono::milliseconds grace = std::chrono::seconds(5); // TERM to KILL
  int64_t restarts = 0; // how often a job that failed is started again
};

// Starts `ranks` processes of the command on this machine, as one job, and
// waits for them. Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT, its fair share of the cores as OMP_NUM_THREADS
// (unless that is set), a process group of its own and an empty standard input.
//
// When a rank fails the others get SIGTERM and, after the grace, SIGKILL; which
// one failed first, and its last lines, is written to standard error in the
// end. A rank fails by a code other than 0, by a signal, or by ending with 0
// without having left the world that it joined while another rank waits in a
// collective. SIGINT, SIGTERM and SIGHUP are passed on; the second of them
// stops the job. When the launcher dies, even by SIGKILL, or the job has ended,
// the ranks and every process that they have started are killed.
//
// A job that failed is started again up to `restarts` times, as a whole, with
// another port; TESSERA_RESTART tells the ranks how many were before, from 0.
// Neither a success nor a signal of the user's nor a command that cannot be run
// leads to that.
//
// Returns 0 when all ranks ended well, else the code of the first that failed,
// 128 + n for signal n, or 127 when the command cannot be run. Takes over
// SIGCHLD and those three signals while it runs. Throws UsageError, IoError.
int launch(const LaunchOptions& options);

} // namespace tessera
