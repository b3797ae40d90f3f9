// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <csignal>

namespace tessera {

// What the operating system refused, as IoError.
[[noreturn]] void throw_launch_error(const char* what);

// A pipe whose reading end does not block. Both ends close on exec; their owner
// closes them otherwise.
struct Pipe {
  Pipe(); // throws IoError
  int read = -1;
  int write = -1;
};

// While this lives, the signals that matter to a launcher (INT, TERM, HUP,
// CHLD) arrive in a pipe, one byte each, whichever thread they hit. What was
// ignored stays ignored (nohup). One at a time per process.
class CaughtSignals {
 public:
  CaughtSignals();
  ~CaughtSignals();
  CaughtSignals(const CaughtSignals&) = delete;
  CaughtSignals& operator=(const CaughtSignals&) = delete;

  int fd() const {
    return pipe_.read;
  }

 private:
  Pipe pipe_;
  std::array<struct sigaction, 4> before_{};
};

} // namespace tessera
