// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/peer_failure.h>
#include <tessera/comm/timed_work.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tessera {

// A send or receive of a collective.
struct GlooTransfer {
  WorkPtr work;
  int64_t peer; // inside the group
};

// One collective on its way. A stage starts transfers and returns them; the
// next one runs when they have arrived. The first stage runs in the call.
class GlooWork : public TimedWork {
 public:
  using Transfers = std::vector<GlooTransfer>;
  using Stage = std::function<Transfers()>;

  // `where` begins the messages of errors.
  GlooWork(std::string where, uint64_t seq, std::vector<Stage> stages)
      : where_(std::move(where)), seq_(seq), stages_(std::move(stages)) {}

 private:
  friend class GlooProgress;

  std::string where_;
  uint64_t seq_;
  std::vector<Stage> stages_;
  std::size_t next_stage_ = 1;
  Transfers transfers_; // of the running stage
  int64_t awaited_ = -1; // the peer of the transfer that is waited for
};

// A thread that carries collectives through their stages, so that none waits
// for its caller. Works queue in the order of their calls; one that has started
// another stage queues again behind the others, so that transfers of many are
// under way at once.
//
// Ranks cannot wait for each other in a circle, as long as all call in one
// order: a rank that waits for the first stage of a work has started every
// stage that earlier works can be waiting for, and the same holds where it
// waits for a later stage, because it has got past that work's first one.
class GlooProgress {
 public:
  GlooProgress(
      std::chrono::milliseconds timeout, std::shared_ptr<PeerFailure> failure);
  // Fails what is still on its way.
  ~GlooProgress();
  GlooProgress(const GlooProgress&) = delete;
  GlooProgress& operator=(const GlooProgress&) = delete;

  // Runs the first stage here and hands the rest over. Throws PeerError when
  // the group is dead.
  WorkPtr start(c10::intrusive_ptr<GlooWork> work);
  // Makes all that is on its way, and all later calls, fail. Any thread.
  void abort(const std::string& reason);

 private:
  void run();
  bool advance(GlooWork& work);
  void wait_for_transfers(GlooWork& work);
  std::exception_ptr explain(
      const GlooWork& work, const std::exception& error) const;
  void throw_if_dead(const GlooWork& work) const;

  std::chrono::milliseconds timeout_;
  std::shared_ptr<PeerFailure> failure_;
  std::mutex mutex_; // of all below, and of every work's transfers_
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<GlooWork>> works_;
  std::string dead_; // the first error
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace tessera
