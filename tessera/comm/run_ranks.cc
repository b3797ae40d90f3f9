// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/run_ranks.h>

#include <ATen/Parallel.h>
#include <tessera/comm/world_impl.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {
namespace {

constexpr auto kGrace =
    std::chrono::seconds(10); // for ranks to notice that they were aborted

// Deadlines are those of ordinary builds; under a sanitizer all is slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSlowness = 5;
#else
constexpr int kSlowness = 1;
#endif

constexpr const char* kDeadlinePassed = "the deadline of run_ranks passed";

// Shared by the caller and the ranks' threads; outlives the caller when a
// thread cannot be joined.
struct Run {
  std::function<void(World)> fn;
  std::mutex mutex;
  std::condition_variable changed;
  struct Rank {
    std::shared_ptr<WorldImpl> world;
    std::string last_collective = "none"; // kept when the world has gone
    std::string error;
    bool done = false;
  };
  std::vector<Rank> ranks;
  bool late = false; // the deadline has passed

  bool all_done() const {
    for (const Rank& rank : ranks) {
      if (!rank.done) {
        return false;
      }
    }
    return true;
  }
};

std::string last_collective(const Record& record) {
  const auto events = record.events();
  if (events.empty()) {
    return "none";
  }
  const CollectiveEvent& last = events.back();
  return fmt::format(
      "{} on {} asked by '{}'", name_of(last.kind), last.axis, last.asker);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "something that is not a std::exception";
  }
}

// Makes the rank's world and runs the function. The world ends with this frame,
// unless the function kept a handle.
void run_in_world(Run& run, std::size_t index, const WorldSetup& setup) {
  auto impl = std::make_shared<WorldImpl>(setup);
  {
    const std::scoped_lock lock(run.mutex);
    run.ranks[index].world = impl;
    if (run.late) {
      impl->abort(kDeadlinePassed);
    }
  }
  std::exception_ptr error;
  try {
    run.fn(World(impl));
  } catch (...) {
    error = std::current_exception();
    impl->abort(message_of(error));
  }
  {
    const std::scoped_lock lock(run.mutex);
    run.ranks[index].world.reset();
    run.ranks[index].last_collective = last_collective(impl->record());
  }
  impl->close();
  if (error) {
    std::rethrow_exception(error);
  }
}

void run_one(
    const std::shared_ptr<Run>& run,
    std::size_t index,
    const WorldSetup& setup) {
  std::string error;
  try {
    run_in_world(*run, index, setup);
  } catch (...) {
    error = message_of(std::current_exception());
    error = error.empty() ? "an exception without a message" : error;
  }
  const std::scoped_lock lock(run->mutex);
  run->ranks[index].error = error;
  run->ranks[index].done = true;
  run->changed.notify_all();
}

std::string report(Run& run, bool late, const RunRanksOptions& options) {
  const std::scoped_lock lock(run.mutex);
  std::string text;
  for (std::size_t index = 0; index < run.ranks.size(); ++index) {
    const Run::Rank& rank = run.ranks[index];
    if (rank.error.empty() && rank.done && !late) {
      continue;
    }
    const std::string state = !rank.done ? "still running"
        : rank.error.empty()             ? "done"
                                         : rank.error;
    text += fmt::format("\n  rank {}: {}", index, state);
    if (late) {
      text += "; last collective: " +
          (rank.world ? last_collective(rank.world->record())
                      : rank.last_collective);
    }
  }
  if (text.empty()) {
    return text;
  }
  const std::string cause = late
      ? fmt::format("not done within {} ms", options.deadline.count())
      : "failed";
  return fmt::format(
      "run_ranks [{} ranks over {}]: {}:{}",
      run.ranks.size(),
      options.backend,
      cause,
      text);
}

// Waits for all ranks; past the deadline aborts them. Returns whether the
// deadline passed.
bool await(Run& run, const RunRanksOptions& options) {
  std::unique_lock lock(run.mutex);
  if (run.changed.wait_for(
          lock, options.deadline * kSlowness, [&] { return run.all_done(); })) {
    return false;
  }
  run.late = true; // for ranks that have no world yet
  for (const Run::Rank& rank : run.ranks) {
    if (rank.world) {
      rank.world->abort(kDeadlinePassed);
    }
  }
  run.changed.wait_for(
      lock, kGrace * kSlowness, [&] { return run.all_done(); });
  return true;
}

} // namespace

void run_ranks(
    int64_t n,
    const std::function<void(World)>& fn,
    const RunRanksOptions& options) {
  if (n < 1 || (options.backend != "shm" && options.backend != "gloo")) {
    throw UsageError(fmt::format(
        "run_ranks: got {} ranks over '{}', expected at least one over shm or "
        "gloo",
        n,
        options.backend));
  }
  auto run = std::make_shared<Run>();
  run->fn = fn;
  run->ranks.resize(static_cast<std::size_t>(n));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < n; ++rank) {
    const WorldSetup setup{
        .rank = rank,
        .size = n,
        .local_rank = rank,
        .backend = options.backend,
        .timeout = options.timeout,
        .store = store,
        .debug_collectives = options.debug_collectives,
        .status = nullptr};
    threads.emplace_back([run, setup] {
      const auto cores =
          static_cast<int64_t>(std::thread::hardware_concurrency());
      at::set_num_threads(
          static_cast<int>(std::max<int64_t>(cores / setup.size, 1)));
      run_one(run, static_cast<std::size_t>(setup.rank), setup);
    });
  }
  const bool late = await(*run, options);
  const std::string text = report(*run, late, options);
  for (std::size_t index = 0; index < threads.size(); ++index) {
    std::unique_lock lock(run->mutex);
    const bool done = run->ranks[index].done;
    lock.unlock();
    done ? threads[index].join() : threads[index].detach();
  }
  if (!text.empty()) {
    throw Error(text);
  }
}

} // namespace tessera
