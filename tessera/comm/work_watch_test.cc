// SPDX-License-Identifier: Apache-2.0
// The watch over calls that go on on a device, with works that the test ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/work_watch.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <string>

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

// As a device's: wait() returns at once.
class PendingWork : public c10d::Work {
 public:
  bool isCompleted() override {
    return done || failed;
  }
  bool isSuccess() const override {
    return done;
  }
  std::exception_ptr exception() const override {
    return failed ? std::make_exception_ptr(std::runtime_error("remote error"))
                  : nullptr;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    return true;
  }

  std::atomic<bool> done = false;
  std::atomic<bool> failed = false;
};

struct Watched {
  explicit Watched(
      std::chrono::milliseconds timeout = std::chrono::minutes(1),
      std::chrono::milliseconds grace = std::chrono::minutes(1))
      : watch(
            {.timeout = timeout,
             .explain =
                 [](const FailedCall& call, const std::exception& error) {
                   const std::string text =
                       call.where + ": rank 1 (" + error.what() + ")";
                   const bool late =
                       text.find("timed out") != std::string::npos;
                   return late ? std::make_exception_ptr(TimeoutError(text))
                               : std::make_exception_ptr(PeerError(text));
                 },
             .stop = [this] { stopped.set_value(); },
             .give_up =
                 [this](const std::string& error) { gave_up.set_value(error); },
             .grace = grace}) {}

  WorkPtr start(std::function<void()> last = {}) {
    work = c10::make_intrusive<PendingWork>();
    return watch.start(
        {.where = "all_reduce [rank 0/2, group dp, seq 3]", .seq = 3},
        [this] { return work; },
        std::move(last));
  }

  c10::intrusive_ptr<PendingWork> work;
  std::promise<void> stopped;
  std::promise<std::string> gave_up;
  WorkWatch watch; // its thread uses the others
};

// Waits until the watch has seen the failure.
void await_failure(const c10d::Work& work) {
  while (work.exception() == nullptr) {
    std::this_thread::yield();
  }
}

TEST(WorkWatch, WhatFollowsACallRunsOnceWhenItIsWaitedForOrSeenToBeDone) {
  Watched watched;
  int runs = 0;
  const WorkPtr waited = watched.start([&runs] { ++runs; });
  EXPECT_FALSE(waited->isCompleted());
  EXPECT_EQ(runs, 0);
  EXPECT_TRUE(waited->wait());
  watched.work->done = true;
  EXPECT_TRUE(waited->isCompleted());
  EXPECT_EQ(runs, 1);
  const WorkPtr seen = watched.start([&runs] { ++runs; });
  watched.work->done = true;
  EXPECT_TRUE(seen->isCompleted());
  EXPECT_TRUE(seen->isSuccess());
  EXPECT_EQ(runs, 2);
}

TEST(WorkWatch, TellsWhenTheDeviceIsDone) {
  Watched watched;
  const WorkPtr work = watched.start();
  std::promise<void> told;
  dynamic_cast<DeviceWork&>(*work).when_done([&told] { told.set_value(); });
  EXPECT_TRUE(work->wait()); // which ends nothing
  watched.work->done = true;
  told.get_future().get();
  bool at_once = false;
  dynamic_cast<DeviceWork&>(*work).when_done([&at_once] { at_once = true; });
  EXPECT_TRUE(at_once);
}

TEST(WorkWatch, ACallThatTakesTooLongFailsAndThenTheDeviceIsFreed) {
  Watched watched(std::chrono::milliseconds(30));
  const WorkPtr work = watched.start();
  await_failure(*work);
  auto stopped = watched.stopped.get_future();
  EXPECT_EQ(
      stopped.wait_for(std::chrono::seconds(0)), std::future_status::timeout)
      << "nobody has been told yet";
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_THAT(
      [&] { work->wait(); },
      ThrowsMessage<TimeoutError>(AllOf(
          StartsWith("all_reduce [rank 0/2, group dp, seq 3]: rank 1"),
          HasSubstr("timed out on the device"))));
  stopped.get();
  EXPECT_TRUE(watched.watch.failed());
}

TEST(WorkWatch, WhatTheBackendReportsFailsEveryLaterCall) {
  Watched watched;
  const WorkPtr work = watched.start();
  watched.work->failed = true;
  await_failure(*work);
  EXPECT_THAT(
      [&] { watched.start(); },
      ThrowsMessage<PeerError>(HasSubstr("rank 1 (remote error)")));
  EXPECT_THAT(
      [&] { work->wait(); },
      ThrowsMessage<PeerError>(HasSubstr("the group is dead; first error")));
  watched.stopped.get_future().get();
}

TEST(WorkWatch, APeerThatEndedFailsTheNextCall) {
  Watched watched;
  watched.watch.fail("rank 1 (pid 7, host h), died");
  EXPECT_THAT(
      [&] { watched.start(); },
      ThrowsMessage<PeerError>(HasSubstr("rank 1 (pid 7, host h), died")));
  watched.stopped.get_future().get();
}

TEST(WorkWatch, GivesUpWhenTheProgramCannotBeTold) {
  Watched watched(std::chrono::milliseconds(30), std::chrono::milliseconds(30));
  const WorkPtr work = watched.start();
  EXPECT_THAT(
      watched.gave_up.get_future().get(),
      HasSubstr("all_reduce [rank 0/2, group dp, seq 3]: rank 1"));
}

// The device finished what there was: nothing hangs, and the next call throws.
TEST(WorkWatch, DoesNotGiveUpWhileTheDeviceGetsDone) {
  Watched watched(std::chrono::minutes(1), std::chrono::milliseconds(200));
  const WorkPtr work = watched.start();
  watched.work->done = true;
  watched.watch.fail("rank 1 died");
  std::promise<void> done;
  dynamic_cast<DeviceWork&>(*work).when_done([&done] { done.set_value(); });
  done.get_future().get();
  EXPECT_EQ(
      watched.gave_up.get_future().wait_for(std::chrono::milliseconds(400)),
      std::future_status::timeout);
}

TEST(WorkWatch, ACallThatCannotBeIssuedIsExplainedAndARefusedOneHarmsNothing) {
  Watched watched;
  const FailedCall call{.where = "broadcast [rank 0/2, group dp, seq 1]"};
  EXPECT_THAT(
      [&] {
        watched.watch.start(
            call, []() -> WorkPtr { throw UsageError("counts must match"); });
      },
      ThrowsMessage<UsageError>("counts must match"));
  EXPECT_FALSE(watched.watch.failed());
  EXPECT_THAT(
      [&] {
        watched.watch.start(call, []() -> WorkPtr {
          throw std::runtime_error("connection refused");
        });
      },
      ThrowsMessage<PeerError>(AllOf(
          StartsWith("broadcast [rank 0/2, group dp, seq 1]: rank 1"),
          HasSubstr("connection refused"))));
  EXPECT_TRUE(watched.watch.failed());
  watched.stopped.get_future().get();
}

} // namespace
} // namespace tessera
