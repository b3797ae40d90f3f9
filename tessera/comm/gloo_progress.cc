// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/comm/gloo_progress.h>
#include <tessera/comm/rendezvous.h>

namespace tessera {
GlooProgress::GlooProgress(
    std::chrono::milliseconds timeout, std::shared_ptr<PeerFailure> failure)
    : timeout_(timeout),
      failure_(std::move(failure)),
      thread_([this] { run(); }) {}

GlooProgress::~GlooProgress() {
  abort("the group ended");
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

WorkPtr GlooProgress::start(c10::intrusive_ptr<GlooWork> work) {
  try {
    const std::scoped_lock lock(mutex_);
    throw_if_dead(*work);
    work->transfers_ = work->stages_.front()();
    works_.push_back(work);
    changed_.notify_all();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::exception_ptr explained = explain(*work, error);
    abort(message_of(explained));
    std::rethrow_exception(explained);
  }
  return work;
}

// The mutex is held.
void GlooProgress::throw_if_dead(const GlooWork& work) const {
  if (!dead_.empty()) {
    throw PeerError(work.where_ + ": the group is dead; first error: " + dead_);
  }
}

std::exception_ptr GlooProgress::explain(
    const GlooWork& work, const std::exception& error) const {
  return failure_->explain(
      {.where = work.where_, .seq = work.seq_, .suspect = work.awaited_},
      error);
}

void GlooProgress::abort(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  dead_ = dead_.empty() ? reason : dead_;
  for (const auto& work : works_) {
    for (const GlooTransfer& transfer : work->transfers_) {
      stop_transfer(*transfer.work);
    }
  }
}

void GlooProgress::run() {
  while (true) {
    c10::intrusive_ptr<GlooWork> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !works_.empty(); });
      if (works_.empty()) {
        return;
      }
      work = works_.front();
    }
    const auto start = std::chrono::steady_clock::now();
    bool done = true;
    std::exception_ptr failure;
    try {
      done = advance(*work);
    } catch (const Error&) {
      failure = std::current_exception();
    } catch (const std::exception& error) {
      failure = explain(*work, error);
      abort(message_of(failure));
    }
    work->add_busy(start);
    {
      const std::scoped_lock lock(mutex_);
      works_.pop_front();
      if (!done) {
        works_.push_back(std::move(work));
        continue;
      }
      work->transfers_.clear();
      work->stages_.clear(); // lets go of the tensors
    }
    work->finish(failure);
  }
}

// Waits for the transfers of the running stage and starts the next one.
// Returns whether nothing is left to wait for.
bool GlooProgress::advance(GlooWork& work) {
  wait_for_transfers(work);
  if (work.next_stage_ == work.stages_.size()) {
    return true;
  }
  auto transfers = work.stages_[work.next_stage_++]();
  const std::scoped_lock lock(mutex_);
  work.transfers_ = std::move(transfers);
  return work.transfers_.empty() && work.next_stage_ == work.stages_.size();
}

void GlooProgress::wait_for_transfers(GlooWork& work) {
  GlooWork::Transfers transfers;
  {
    const std::scoped_lock lock(mutex_);
    throw_if_dead(work);
    transfers = work.transfers_;
  }
  for (const GlooTransfer& transfer : transfers) {
    work.awaited_ = transfer.peer;
    if (!transfer.work->wait(timeout_)) { // it was stopped
      const std::scoped_lock lock(mutex_);
      throw PeerError(work.where_ + ": " + dead_);
    }
  }
  work.awaited_ = -1;
}

} // namespace tessera
