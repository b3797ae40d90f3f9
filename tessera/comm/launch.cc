// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch.h>
#include <tessera/comm/launch_guard.h>
#include <tessera/comm/launch_job.h>
#include <tessera/comm/launch_output.h>
#include <unistd.h>

#include <csignal>
#include <optional>

namespace tessera {
namespace {

// A signal of the user's that has come between two jobs.
std::optional<int> pending_signal(const CaughtSignals& signals) {
  std::optional<int> pending;
  unsigned char number = 0;
  while (read(signals.fd(), &number, 1) == 1) {
    if (number != SIGCHLD) {
      pending = number;
    }
  }
  return pending;
}

// In the guard.
int run_jobs(const LaunchOptions& options) {
  const CaughtSignals signals;
  for (int64_t count = 0;; ++count) {
    const JobEnd end = run_job(options, signals, count);
    kill_descendants(); // nothing of it may disturb the next one
    if (!end.failed || count == options.restarts) {
      return end.code;
    }
    if (const auto signal = pending_signal(signals)) {
      return 128 + *signal;
    }
    write_all(
        STDERR_FILENO,
        fmt::format(
            "tessera: starting the job again, {} of {}\n",
            count + 1,
            options.restarts));
  }
}

} // namespace

int launch(const LaunchOptions& options) {
  if (options.ranks < 1 || options.command.empty() || options.restarts < 0) {
    throw UsageError(fmt::format(
        "launch: got {} ranks of a command of {} words with {} restarts, "
        "expected at least one rank and word, and no negative number",
        options.ranks,
        options.command.size(),
        options.restarts));
  }
  return run_guarded([&options] { return run_jobs(options); });
}

} // namespace tessera
