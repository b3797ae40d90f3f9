// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/work_watch.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// Between looks at the device, which cannot wake anybody.
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

struct Entry {
  FailedCall call;
  Clock::time_point deadline;
  WorkPtr work; // null while it is being issued
  std::function<void()> when_done;
  bool done = false;
};

} // namespace

// Shared with the works, which may outlive the group.
class WorkWatch::State {
 public:
  explicit State(WorkWatchOptions options) : options_(std::move(options)) {}

  std::shared_ptr<Entry> begin(FailedCall call) {
    const std::scoped_lock lock(mutex_);
    throw_if_failed(call.where);
    auto entry = std::make_shared<Entry>();
    entry->call = std::move(call);
    entry->deadline = Clock::now() + options_.timeout;
    entries_.push_back(entry);
    changed_.notify_all();
    return entry;
  }
  void issued(Entry& entry, WorkPtr work) {
    const std::scoped_lock lock(mutex_);
    entry.work = std::move(work);
  }
  // The caller's own call failed, and the caller is told.
  [[noreturn]] void failed(Entry& entry, const std::exception& error) {
    const auto explained = options_.explain(entry.call, error);
    const std::scoped_lock lock(mutex_);
    std::erase_if(
        entries_, [&](const auto& each) { return each.get() == &entry; });
    set_error(explained);
    told_ = true;
    std::rethrow_exception(explained);
  }
  // Nothing has begun: the group lives on.
  void withdraw(Entry& entry) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(
        entries_, [&](const auto& each) { return each.get() == &entry; });
  }

  void when_done(Entry& entry, std::function<void()> f) {
    {
      const std::scoped_lock lock(mutex_);
      if (!entry.done) {
        entry.when_done = std::move(f);
        return;
      }
    }
    f();
  }

  void check(const std::string& where) {
    const std::scoped_lock lock(mutex_);
    throw_if_failed(where);
  }
  std::exception_ptr error() const {
    const std::scoped_lock lock(mutex_);
    return error_;
  }
  void fail(const std::string& reason) {
    const std::scoped_lock lock(mutex_);
    set_error(std::make_exception_ptr(PeerError(reason)));
  }
  std::exception_ptr explain(
      const Entry& entry, const std::exception& error) const {
    return options_.explain(entry.call, error);
  }
  void fail(const std::exception_ptr& error) {
    const std::scoped_lock lock(mutex_);
    set_error(error);
  }

  void end() {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  void run();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // The mutex is held, in all below.
  void set_error(const std::exception_ptr& error) {
    if (!error_) {
      error_ = error;
      text_ = message_of(error);
    }
    changed_.notify_all();
  }
  // The first to be told gets the error as it is.
  void throw_if_failed(const std::string& where) {
    if (!error_) {
      return;
    }
    const bool first = !std::exchange(told_, true);
    changed_.notify_all();
    if (first) {
      std::rethrow_exception(error_);
    }
    throw PeerError(where + ": the group is dead; first error: " + text_);
  }
  void drop_done(Lock& lock);
  void look_at_first(Lock& lock);
  void see_to_error(Lock& lock);

  WorkWatchOptions options_;
  mutable std::mutex mutex_; // of all below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Entry>> entries_; // as issued
  std::exception_ptr error_;
  std::string text_; // of the error
  bool told_ = false;
  bool stopping_ = false;
};

// A device runs a group's calls in the order of their issue.
void WorkWatch::State::drop_done(Lock& lock) {
  while (!entries_.empty()) {
    const auto entry = entries_.front();
    const WorkPtr work = entry->work;
    lock.unlock(); // works have locks of their own
    const bool done = work && work->isCompleted() && work->isSuccess();
    lock.lock();
    if (!done) {
      return;
    }
    std::erase(entries_, entry);
    entry->done = true;
    const auto tell = std::exchange(entry->when_done, nullptr);
    if (tell) {
      lock.unlock();
      tell();
      lock.lock();
    }
  }
}

void WorkWatch::State::look_at_first(Lock& lock) {
  if (entries_.empty() || error_) {
    return;
  }
  const auto entry = entries_.front();
  const WorkPtr work = entry->work;
  lock.unlock();
  std::exception_ptr found = work ? work->exception() : nullptr;
  if (!found && Clock::now() > entry->deadline) {
    found =
        std::make_exception_ptr(std::runtime_error("timed out on the device"));
  }
  std::exception_ptr explained;
  try {
    if (found) {
      std::rethrow_exception(found);
    }
  } catch (const std::exception& error) {
    explained = options_.explain(entry->call, error);
  }
  lock.lock();
  if (explained) {
    set_error(explained);
  }
}

void WorkWatch::State::see_to_error(Lock& lock) {
  const auto end = Clock::now() + options_.grace;
  while (!told_ && !stopping_ && !entries_.empty() && Clock::now() < end) {
    changed_.wait_for(lock, kBetweenLooks);
    drop_done(lock);
  }
  if (!told_ && !stopping_ && !entries_.empty()) {
    lock.unlock();
    options_.give_up(text_);
    lock.lock();
  }
  changed_.wait(lock, [this] { return told_ || stopping_; });
  if (told_) {
    lock.unlock();
    options_.stop();
    lock.lock();
  }
}

void WorkWatch::State::run() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (error_) {
      see_to_error(lock);
      return;
    }
    if (entries_.empty()) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_for(
        lock, kBetweenLooks, [this] { return stopping_ || error_; });
    drop_done(lock);
    look_at_first(lock);
  }
}

namespace {

class WatchedWork : public DeviceWork {
 public:
  WatchedWork(
      std::shared_ptr<WorkWatch::State> state,
      std::shared_ptr<Entry> entry,
      WorkPtr inner,
      std::function<void()> last)
      : state_(std::move(state)),
        entry_(std::move(entry)),
        inner_(std::move(inner)),
        last_(std::move(last)) {}

  // A call that failed is done when the watch has found out why.
  bool isCompleted() override {
    const bool done = inner_->isCompleted() && inner_->isSuccess();
    if (done) {
      finish_once();
    }
    return done || exception() != nullptr;
  }
  bool isSuccess() const override {
    return exception() == nullptr && inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return state_->error();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    state_->check(entry_->call.where);
    try {
      inner_->wait(timeout);
    } catch (const std::exception& error) {
      state_->fail(state_->explain(*entry_, error));
    }
    state_->check(entry_->call.where);
    finish_once();
    return true;
  }
  void when_done(std::function<void()> f) override {
    state_->when_done(*entry_, std::move(f));
  }

 private:
  void finish_once() {
    const std::scoped_lock lock(mutex_);
    if (last_) {
      std::exchange(last_, nullptr)();
    }
  }

  std::shared_ptr<WorkWatch::State> state_;
  std::shared_ptr<Entry> entry_;
  WorkPtr inner_;
  std::mutex mutex_; // of last_
  std::function<void()> last_;
};

} // namespace

WorkWatch::WorkWatch(WorkWatchOptions options)
    : state_(std::make_shared<State>(std::move(options))),
      thread_([state = state_] { state->run(); }) {}

WorkWatch::~WorkWatch() {
  state_->end();
  thread_.join();
}

WorkPtr WorkWatch::start(
    FailedCall call,
    const std::function<WorkPtr()>& issue,
    std::function<void()> last) {
  const auto entry = state_->begin(std::move(call));
  WorkPtr work;
  try {
    work = issue();
  } catch (const UsageError&) {
    state_->withdraw(*entry);
    throw;
  } catch (const std::exception& error) {
    state_->failed(*entry, error);
  }
  state_->issued(*entry, work);
  return c10::make_intrusive<WatchedWork>(
      state_, entry, std::move(work), std::move(last));
}

void WorkWatch::fail(const std::string& reason) {
  state_->fail(reason);
}

bool WorkWatch::failed() const {
  return state_->error() != nullptr;
}

} // namespace tessera
