// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera {

// Runs the calls of one group one after another, beside the program. It starts
// with the first call. While a call waits for its peers the thread sleeps
// rather than spins, and where cores are left over that no compute thread of
// the group's ranks needs, it keeps to one of these. Thread-safe.
class ProgressThread {
 public:
  ProgressThread(int64_t rank, int64_t size);
  ~ProgressThread(); // runs what is queued first
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // Queues a call and returns at once. What `call` throws the Work's wait()
  // throws. `results` are what the Work's future holds, and are kept alive. The
  // call is asked for by the asker of this thread's AskerScope.
  WorkPtr submit(std::function<void()> call, std::vector<at::Tensor> results);
  // Returns when nothing is queued or running. Costs next to nothing while
  // nothing was ever submitted.
  void drain();

 private:
  class QueuedWork;

  void run();

  const int64_t rank_;
  const int64_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<QueuedWork>> queue_; // the first one runs
  bool ending_ = false;
  std::atomic<bool> used_ = false;
  std::thread thread_;
};

// Whether this thread waits for peers without spinning, since others of its
// process compute meanwhile.
bool waits_quietly();

} // namespace tessera
