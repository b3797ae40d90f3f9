// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <pthread.h>
#include <sched.h>
#include <tessera/comm/progress_thread.h>
#include <tessera/comm/record.h>

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

class ProgressThread::QueuedWork : public c10d::Work {
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
    std::exception_ptr error;
    try {
      const AskerScope asker(asker_);
      call_();
    } catch (...) {
      error = std::current_exception();
    }
    call_ = nullptr;
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  std::function<void()> call_;
  const char* asker_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

ProgressThread::ProgressThread(int64_t rank, int64_t size)
    : rank_(rank), size_(size) {}

ProgressThread::~ProgressThread() {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

WorkPtr ProgressThread::submit(
    std::function<void()> call, std::vector<at::Tensor> results) {
  auto work =
      c10::make_intrusive<QueuedWork>(std::move(call), std::move(results));
  {
    const std::scoped_lock lock(mutex_);
    used_.store(true, std::memory_order_relaxed);
    queue_.push_back(work);
    if (!thread_.joinable()) {
      thread_ = std::thread([this, compute = at::get_num_threads()] {
        quiet = true;
        keep_off_compute_cores(rank_, size_, compute);
        run();
      });
    }
  }
  changed_.notify_all();
  return work;
}

void ProgressThread::drain() {
  if (!used_.load(std::memory_order_relaxed)) {
    return;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty(); });
}

void ProgressThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    const auto work = queue_.front();
    lock.unlock();
    work->run();
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

} // namespace tessera
