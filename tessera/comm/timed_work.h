// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera {

// A call that a thread of ours moves on beside the program, and how long it
// took that thread. Calls of one thread do not overlap: their times add up.
class TimedWork : public c10d::Work {
 public:
  // Complete once the work is.
  double busy_seconds() const {
    return busy_.count();
  }

 protected:
  // Adds the time since `start`. Before finish(), by the thread that moves it.
  void add_busy(std::chrono::steady_clock::time_point start) {
    busy_ += std::chrono::steady_clock::now() - start;
  }

 private:
  std::chrono::duration<double> busy_{0};
};

} // namespace tessera
