// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/peer_failure.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera {

// A call that goes on on a device: wait() returns when the device's current
// queue has been told to wait for it.
class DeviceWork : public c10d::Work {
 public:
  // Calls `f` once, on some thread, when the device has done it; never if it
  // fails. At most once per work.
  virtual void when_done(std::function<void()> f) = 0;
};

struct WorkWatchOptions {
  std::chrono::milliseconds timeout{}; // of one call, from its issue
  // Turns what the backend says into an error that names who is behind it.
  std::function<std::exception_ptr(
      const FailedCall& call, const std::exception& error)>
      explain;
  // Frees the device of what will never end. Once, after the program has been
  // told.
  std::function<void()> stop;
  // The program sits in a call that waits for the device, or asks nothing, and
  // cannot be told. Should not return.
  std::function<void(const std::string& error)> give_up;
  std::chrono::milliseconds grace = std::chrono::seconds(2);
};

// Looks after the calls of one group that go on on a device, where nothing
// throws and nothing ends by itself: a peer that is gone leaves the device
// waiting, and with it the next read of a result. A thread sees the first call
// that fails or takes longer than the timeout. From then on every call and
// wait() of the group throws that error, and once one has, the device is freed.
// It is not freed before: a program that has not been told would read results
// that were never computed. If nobody can be told within `grace`, the process
// gives up.
class WorkWatch {
 public:
  explicit WorkWatch(WorkWatchOptions options);
  ~WorkWatch();
  WorkWatch(const WorkWatch&) = delete;
  WorkWatch& operator=(const WorkWatch&) = delete;

  // Issues a call and returns its work; `last` runs in wait(), or when the work
  // is first seen to be done. The clock runs while `issue` does: connecting to
  // a peer may block. Throws the group's first error, or what `issue` threw,
  // explained; the group has failed then.
  WorkPtr start(
      FailedCall call,
      const std::function<WorkPtr()>& issue,
      std::function<void()> last = {});
  // A peer is known to have failed. Any thread.
  void fail(const std::string& reason);
  bool failed() const;

  class State; // shared with the works

 private:
  std::shared_ptr<State> state_;
  std::thread thread_;
};

} // namespace tessera
