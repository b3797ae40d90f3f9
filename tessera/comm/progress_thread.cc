// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <pthread.h>
#include <sched.h>
#include <tessera/base/error.h>
#include <tessera/comm/progress_thread.h>
#include <tessera/comm/record.h>
#include <tessera/comm/timed_work.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace tessera {
namespace {

thread_local bool quiet = false;

// Cores that the ranks' compute threads leave over are shared out from the
// last one down.
void keep_off_compute_cores(int64_t rank, int64_t size, int64_t compute) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return;
  }
  const int64_t spare = CPU_COUNT(&allowed) - size * compute;
  if (spare <= 0) {
    return;
  }
  int64_t skip = rank % spare;
  for (int core = CPU_SETSIZE - 1; core >= 0; --core) {
    if (CPU_ISSET(core, &allowed) && skip-- == 0) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(core, &own);
      pthread_setaffinity_np(pthread_self(), sizeof(own), &own);
      return;
    }
  }
}

} // namespace

bool waits_quietly() {
  return quiet;
}

class ProgressThread::QueuedWork : public TimedWork {
 public:
  QueuedWork(std::function<void()> call, std::vector<at::Tensor> results)
      : call_(std::move(call)),
        asker_(AskerScope::current()),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

  void run() {
    const auto start = std::chrono::steady_clock::now();
    std::exception_ptr error;
    try {
      const AskerScope asker(asker_);
      call_();
    } catch (...) {
      error = std::current_exception();
    }
    call_ = nullptr;
    add_busy(start);
    try { // what callbacks throw comes out of wait()
      if (error) {
        future_->setError(error);
      } else {
        future_->markCompleted(c10::IValue(results_));
      }
    } catch (...) {
      error = std::current_exception();
    }
    finish(error);
  }

 private:
  std::function<void()> call_;
  const char* asker_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct ProgressThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<QueuedWork>> works; // the first one runs
  bool ending = false;
};

ProgressThread::ProgressThread(int64_t rank, int64_t size)
    : rank_(rank), size_(size), queue_(std::make_shared<Queue>()) {}

ProgressThread::~ProgressThread() {
  {
    const std::scoped_lock lock(queue_->mutex);
    queue_->ending = true;
  }
  queue_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else if (thread_.joinable()) {
    thread_.join();
  }
}

WorkPtr ProgressThread::submit(
    std::function<void()> call, std::vector<at::Tensor> results) {
  auto work =
      c10::make_intrusive<QueuedWork>(std::move(call), std::move(results));
  {
    const std::scoped_lock lock(queue_->mutex);
    if (!thread_.joinable()) { // before a work waits for it: this may throw
      thread_ = std::thread([queue = queue_,
                             rank = rank_,
                             size = size_,
                             compute = at::get_num_threads()] {
        quiet = true;
        keep_off_compute_cores(rank, size, compute);
        run(*queue);
      });
    }
    used_.store(true, std::memory_order_relaxed);
    queue_->works.push_back(work);
  }
  queue_->changed.notify_all();
  return work;
}

void ProgressThread::drain() {
  if (!used_.load(std::memory_order_relaxed)) {
    return;
  }
  std::unique_lock lock(queue_->mutex);
  if (thread_.get_id() == std::this_thread::get_id()) {
    throw UsageError(
        "a collective in the callback of a background call would wait for "
        "that call; use background() there too, or wait() and call it then");
  }
  queue_->changed.wait(lock, [this] { return queue_->works.empty(); });
}

void ProgressThread::run(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  while (true) {
    queue.changed.wait(
        lock, [&queue] { return queue.ending || !queue.works.empty(); });
    if (queue.works.empty()) {
      return;
    }
    const auto work = queue.works.front();
    lock.unlock();
    work->run();
    lock.lock();
    queue.works.pop_front();
    queue.changed.notify_all();
  }
}

} // namespace tessera
