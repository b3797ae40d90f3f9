// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/world.h>

#include <chrono>
#include <functional>
#include <string>

namespace tessera {

struct RunRanksOptions {
  std::string backend = "shm"; // or "gloo"
  std::chrono::milliseconds timeout =
      std::chrono::seconds(60); // of one collective
  std::chrono::milliseconds deadline =
      std::chrono::seconds(120); // of the whole function
  bool debug_collectives = false; // as in InitOptions
};

// Runs `fn` on `n` threads, each a rank of one fresh world with a fair share of
// the cores for its operators, and joins them. For
// tests. Throws an Error that lists every failing rank with its message; at the
// deadline also each rank's last collective.
void run_ranks(
    int64_t n,
    const std::function<void(World)>& fn,
    const RunRanksOptions& options = {});

} // namespace tessera
