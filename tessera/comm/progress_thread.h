// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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
  // Runs what is queued first; on the thread itself, where the callback of a
  // future may drop the last handle of the group, right after.
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // Queues a call and returns at once. What `call` throws the Work's wait()
  // throws. `results` are what the Work's future holds, and are kept alive. The
  // call is asked for by the asker of this thread's AskerScope.
  WorkPtr submit(std::function<void()> call, std::vector<at::Tensor> results);
  // Returns when nothing is queued or running. Costs next to nothing while
  // nothing was ever submitted. Throws UsageError on the thread itself, as in
  // the callback of a future: it would wait for the call that it is part of.
  void drain();

 private:
  class QueuedWork;
  struct Queue; // outlives this object where the thread itself drops it

  static void run(Queue& queue);

  const int64_t rank_;
  const int64_t size_;
  std::shared_ptr<Queue> queue_;
  std::atomic<bool> used_ = false;
  std::thread thread_; // started and read with the queue's mutex held
};

// Whether this thread waits for peers without spinning, since others of its
// process compute meanwhile.
bool waits_quietly();

} // namespace tessera
