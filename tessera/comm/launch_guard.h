// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace tessera {

// Runs `job` in a process between this one and all that the job starts, and
// returns its result. That process, the guard, adopts whatever its descendants
// leave behind (it is a subreaper, prctl(2)), has a process group of its own
// and notices when this process dies, even by SIGKILL: in any case it ends
// last, and kills all of its descendants before. INT, TERM and HUP are passed
// on to it.
//
// `job` runs after a fork without an exec: it may not count on threads of this
// process. An exception in it is thrown here as IoError.
int run_guarded(const std::function<int()>& job);

// In the guard: the process that called run_guarded has died.
bool guarded_process_died();

// Kills every descendant of this process, those that processes in between have
// left to it included, and waits for their end. For the guard.
void kill_descendants();

} // namespace tessera
