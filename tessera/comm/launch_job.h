// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/launch.h>
#include <tessera/comm/launch_signals.h>

#include <cstdint>

namespace tessera {

struct JobEnd {
  int code; // as launch() returns it
  bool failed; // by itself: not by a signal of the user's, and the command can
               // be run
};

// One job from start to end, see launch(). `count`: how many were run before.
// Runs in a guard (launch_guard.h). Throws IoError.
JobEnd run_job(
    const LaunchOptions& options, const CaughtSignals& signals, int64_t count);

} // namespace tessera
