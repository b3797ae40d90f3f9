// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/jit_type.h>
#include <tessera/comm/mpi/mpi_progress.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

constexpr auto kPause = std::chrono::microseconds(50); // between two rounds

struct Followed {
  std::shared_ptr<MpiGroup> group;
  MpiOperationPtr operation;
  FuturePtr future;
  Clock::time_point deadline;
};

struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Followed> followed;
  bool stopping = false;
  std::thread thread;
};

Progress& progress() {
  static auto* one = new Progress; // its thread ends with the process
  return *one;
}

void settle_followed(const Followed& one) {
  std::exception_ptr error;
  {
    const std::scoped_lock lock(one.operation->mutex);
    error = one.operation->error;
  }
  if (error) {
    one.future->setError(error);
  } else {
    one.future->markCompleted(c10::IValue(one.operation->results));
  }
}

// Whether it needs no more following.
bool advance(const Followed& one) {
  try {
    if (one.group->test(*one.operation)) {
      settle_followed(one);
      return true;
    }
    if (Clock::now() > one.deadline) {
      one.group->time_out(*one.operation, one.group->timeout());
    }
    return false;
  } catch (...) {
    one.future->setError(std::current_exception());
    return true;
  }
}

void run() {
  Progress& own = progress();
  std::list<Followed> mine;
  while (true) {
    {
      std::unique_lock lock(own.mutex);
      const auto wake = [&own] {
        return own.stopping || !own.followed.empty();
      };
      if (mine.empty()) {
        own.changed.wait(lock, wake);
      } else {
        own.changed.wait_for(lock, kPause, wake);
      }
      if (own.stopping) {
        return;
      }
      mine.splice(mine.end(), own.followed);
    }
    mine.remove_if(advance);
  }
}

} // namespace

FuturePtr follow_mpi_operation(
    std::shared_ptr<MpiGroup> group, MpiOperationPtr operation) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  const auto deadline = Clock::now() + group->timeout();
  Followed one{
      .group = std::move(group),
      .operation = std::move(operation),
      .future = future,
      .deadline = deadline};
  if (advance(one)) {
    return future;
  }
  Progress& own = progress();
  {
    const std::scoped_lock lock(own.mutex);
    own.followed.push_back(std::move(one));
    if (!own.thread.joinable() && !own.stopping) {
      own.thread = std::thread(run);
    }
  }
  own.changed.notify_all();
  return future;
}

void stop_mpi_progress() {
  Progress& own = progress();
  {
    const std::scoped_lock lock(own.mutex);
    own.stopping = true;
  }
  own.changed.notify_all();
  if (own.thread.joinable() &&
      own.thread.get_id() != std::this_thread::get_id()) {
    own.thread.join();
  }
}

} // namespace tessera
