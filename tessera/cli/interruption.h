// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace tessera::cli {

// What the shell calls the end by Ctrl-C.
constexpr int kInterruptedCode = 128 + SIGINT;

// While it lives, the first SIGINT does not end the process but is noted, so
// that what runs can be left at a good place; the second ends it. At most one
// at a time in a process.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  bool came() const;

 private:
  struct sigaction before_ = {};
};

} // namespace tessera::cli
