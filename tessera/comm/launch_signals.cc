// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch_signals.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace tessera {
namespace {

constexpr std::array kCaught = {SIGINT, SIGTERM, SIGHUP, SIGCHLD};

std::atomic<int> caught_pipe = -1; // where the handler writes

void write_caught(int signal) {
  const int error = errno;
  const auto number = static_cast<unsigned char>(signal);
  // A full pipe has woken the launcher already.
  [[maybe_unused]] const auto written = write(caught_pipe.load(), &number, 1);
  errno = error;
}

} // namespace

void throw_launch_error(const char* what) {
  throw IoError(fmt::format("launch: {}: {}", what, std::strerror(errno)));
}

Pipe::Pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw_launch_error("pipe");
  }
  read = ends[0];
  write = ends[1];
  fcntl(read, F_SETFL, O_NONBLOCK);
}

CaughtSignals::CaughtSignals() {
  fcntl(pipe_.write, F_SETFL, O_NONBLOCK);
  caught_pipe = pipe_.write;
  struct sigaction action {};
  action.sa_handler = write_caught;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    sigaction(kCaught[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN || kCaught[i] == SIGCHLD) {
      sigaction(kCaught[i], &action, nullptr);
    }
  }
}

CaughtSignals::~CaughtSignals() {
  for (std::size_t i = 0; i < kCaught.size(); ++i) {
    sigaction(kCaught[i], &before_[i], nullptr);
  }
  caught_pipe = -1;
  close(pipe_.read);
  close(pipe_.write);
}

} // namespace tessera
