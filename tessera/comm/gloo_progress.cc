// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/comm/gloo_progress.h>
#include <tessera/comm/rendezvous.h>

namespace tessera {
namespace {

// Not every kind of work can be aborted; those end by their timeout.
void abort_transfer(const WorkPtr& transfer) {
  try {
    transfer->abort();
  } catch (const std::exception&) {
    return;
  }
}

} // namespace

std::exception_ptr translated(
    const std::string& where, const std::exception& error) {
  const std::string what = brief(error);
  if (what.find("imed out") != std::string::npos ||
      what.find("imeout") != std::string::npos) {
    return std::make_exception_ptr(TimeoutError(
        where + ": a peer did not answer in time; is it still running? (" +
        what + ")"));
  }
  return std::make_exception_ptr(PeerError(
      where +
      ": a peer went away or called something else; look at its output (" +
      what + ")"));
}

GlooProgress::GlooProgress(std::chrono::milliseconds timeout)
    : timeout_(timeout), thread_([this] { run(); }) {}

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
  const std::scoped_lock lock(mutex_);
  if (!dead_.empty()) {
    throw PeerError(
        work->where_ + ": the group is dead; first error: " + dead_);
  }
  try {
    work->transfers_ = work->stages_.front()();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    dead_ = brief(error);
    std::rethrow_exception(translated(work->where_, error));
  }
  works_.push_back(work);
  changed_.notify_all();
  return work;
}

void GlooProgress::abort(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  dead_ = dead_.empty() ? reason : dead_;
  for (const auto& work : works_) {
    for (const WorkPtr& transfer : work->transfers_) {
      abort_transfer(transfer);
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
    bool done = true;
    std::exception_ptr failure;
    try {
      done = advance(*work);
    } catch (const Error&) {
      failure = std::current_exception();
    } catch (const std::exception& error) {
      failure = translated(work->where_, error);
      abort(work->where_ + ": " + brief(error));
    }
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
  std::vector<WorkPtr> transfers;
  {
    const std::scoped_lock lock(mutex_);
    if (!dead_.empty()) {
      throw PeerError(
          work.where_ + ": the group is dead; first error: " + dead_);
    }
    transfers = work.transfers_;
  }
  for (const WorkPtr& transfer : transfers) {
    if (!transfer->wait(timeout_)) {
      throw PeerError(work.where_ + ": stopped before it was done");
    }
  }
}

} // namespace tessera
