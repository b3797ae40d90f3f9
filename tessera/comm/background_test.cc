// SPDX-License-Identifier: Apache-2.0
// Calls that go on beside the program, and many tensors in one call.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/coalesced.h>
#include <tessera/comm/record_impl.h>
#include <tessera/comm/run_ranks.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Background, CallsReturnBeforeTheirPeersCome) {
  for (const int64_t n : {2, 3, 4}) {
    run_ranks(n, [n](const World& world) {
      const Group& group = world.group();
      const Group background = group.background();
      at::Tensor x = at::full({100'000}, world.rank() + 1, at::kFloat);
      const WorkPtr work = background.all_reduce(x, ReduceOp::kSum);
      if (world.rank() == 0) { // the others come when rank 0 has gone on
        EXPECT_FALSE(work->isCompleted());
        world.store()->set("went on", "1");
      } else {
        world.store()->wait({"went on"});
      }
      if (world.rank() != 0) {
        work->wait();
      }
      const auto future = work->getFuture();
      future->wait();
      EXPECT_TRUE(future->completed());
      work->wait();
      EXPECT_TRUE(x.eq(n * (n + 1) / 2).all().item<bool>());
    });
  }
}

TEST(Background, WhatRanBesideTheProgramIsHidden) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        2,
        [](const World& world) {
          const auto hidden = [&] {
            return world.record().impl().hidden_seconds();
          };
          const at::Tensor in = at::ones({1 << 20}, at::kFloat);
          const at::Tensor out = at::empty({1 << 19}, at::kFloat);
          const std::vector<int64_t> counts{1 << 19, 1 << 19};
          const WorkPtr work = world.group().background().reduce_scatter(
              in, out, counts, ReduceOp::kSum);
          EXPECT_EQ(hidden(), 0);
          while (!work->isCompleted()) {
            std::this_thread::yield(); // the program works on
          }
          work->wait();
          const double once = hidden();
          EXPECT_GT(once, 0);
          work->wait();
          EXPECT_EQ(hidden(), once);
        },
        {.backend = backend});
  }
}

TEST(Background, CallsOfBothKindsKeepTheirOrder) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        3,
        [](const World& world) {
          const Group group = world.group();
          const Group background = group.background();
          std::vector<at::Tensor> tensors;
          std::vector<WorkPtr> works;
          for (int64_t i = 0; i < 60; ++i) {
            tensors.push_back(at::full({1 + i * 997}, i, at::kFloat));
            const bool now = i % 5 == world.rank(); // each rank in its own way
            works.push_back((now ? group : background)
                                .all_reduce(tensors.back(), ReduceOp::kSum));
          }
          for (std::size_t i = works.size(); i-- > 0;) {
            works[i]->wait();
            EXPECT_TRUE(
                tensors[i].eq(static_cast<int64_t>(i) * 3).all().item<bool>());
          }
          EXPECT_EQ(world.record().count(CollectiveKind::kAllReduce), 60);
        },
        {.backend = backend});
  }
}

TEST(Background, AMismatchComesOutOfWaitOnEveryRank) {
  run_ranks(2, [](const World& world) {
    at::Tensor x = at::ones({100 + world.rank()});
    const WorkPtr work =
        world.group().background().all_reduce(x, ReduceOp::kSum);
    EXPECT_THAT(
        [&] { work->wait(); },
        ThrowsMessage<PeerError>(HasSubstr("shapes must match")));
  });
}

// A message that the peer wants before it comes to the collective.
// Runs `fn` on rank 0 with a call whose peers come when `fn` has returned.
void with_a_waiting_call(
    const World& world,
    const Group& group,
    const std::function<void(const WorkPtr&)>& fn) {
  at::Tensor x = at::ones({100'000});
  if (world.rank() == 0) {
    fn(group.background().all_reduce(x, ReduceOp::kSum));
    world.store()->set("went on", "1");
  } else {
    world.store()->wait({"went on"});
    group.background().all_reduce(x, ReduceOp::kSum)->wait();
  }
}

TEST(Background, ACollectiveInACallbackIsRefusedForItWouldWaitForItself) {
  run_ranks(2, [](const World& world) {
    const Group& group = world.group();
    c10::intrusive_ptr<c10::ivalue::Future> after;
    with_a_waiting_call(world, group, [&](const WorkPtr& work) {
      after = work->getFuture()->then(
          [&group](c10::ivalue::Future&) {
            group.barrier()->wait();
            return c10::IValue();
          },
          c10::NoneType::get());
    });
    if (after) {
      EXPECT_THAT(
          [&] { after->waitAndThrow(); },
          ThrowsMessage<UsageError>(HasSubstr("callback")));
    }
    group.barrier()->wait(); // nothing is lost
  });
}

TEST(Background, WhatACallbackThrowsComesOutOfWait) {
  run_ranks(2, [](const World& world) {
    WorkPtr kept;
    with_a_waiting_call(world, world.group(), [&](const WorkPtr& work) {
      work->getFuture()->addCallback(
          [](c10::ivalue::Future&) { throw std::runtime_error("mine"); });
      kept = work;
    });
    if (kept) {
      EXPECT_THAT(
          [&] { kept->wait(); },
          ThrowsMessage<std::runtime_error>(HasSubstr("mine")));
    }
    world.group().barrier()->wait();
  });
}

TEST(Background, ACallbackMayHoldTheLastHandleOfItsGroup) {
  run_ranks(2, [](const World& world) {
    std::promise<void> gone;
    struct Held {
      std::shared_ptr<void> told; // goes after the group
      Group group;
    };
    {
      Group group = world.new_group(std::vector<int64_t>{0, 1}, "own");
      with_a_waiting_call(world, group, [&](const WorkPtr& work) {
        auto held = std::make_shared<Held>();
        held->told = {nullptr, [&](void*) { gone.set_value(); }};
        held->group = std::move(group);
        work->getFuture()->addCallback([held](c10::ivalue::Future&) {});
      });
    }
    if (world.rank() == 0) {
      gone.get_future().wait();
    }
  });
}

TEST(Background, MessagesPassACollectiveThatWaits) {
  run_ranks(2, [](const World& world) {
    const Group& group = world.group();
    at::Tensor x = at::ones({1000});
    at::Tensor message = at::full({50'000}, world.rank(), at::kFloat);
    WorkPtr work;
    if (world.rank() == 0) {
      work = group.background().all_reduce(x, ReduceOp::kSum);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group.send(message, 1)->wait();
    } else {
      group.recv(message, 0)->wait();
      EXPECT_TRUE(message.eq(0).all().item<bool>());
      work = group.all_reduce(x, ReduceOp::kSum);
    }
    work->wait();
    EXPECT_TRUE(x.eq(2).all().item<bool>());
  });
}

TEST(Coalesced, EqualsOneCallPerTensorAndIsOneCall) {
  for (const int64_t n : {1, 2, 3, 4}) {
    for (const bool in_background : {false, true}) {
      run_ranks(n, [n, in_background](const World& world) {
        const Group group =
            in_background ? world.group().background() : world.group();
        std::vector<at::Tensor> tensors{
            at::full({3, 5}, world.rank(), at::kFloat),
            at::full({}, 10 + world.rank(), at::kFloat),
            at::empty({0, 4}),
            at::full({4, 6}, world.rank(), at::kFloat).t()};
        all_reduce_coalesced(group, tensors, ReduceOp::kSum)->wait();
        const int64_t sum = n * (n - 1) / 2;
        EXPECT_TRUE(tensors[0].eq(sum).all().item<bool>());
        EXPECT_EQ(tensors[1].item<float>(), static_cast<float>(10 * n + sum));
        EXPECT_TRUE(tensors[3].eq(sum).all().item<bool>());
        EXPECT_EQ(
            world.record().count(CollectiveKind::kAllReduce), n == 1 ? 0 : 1);
        EXPECT_EQ(
            world.record().bytes(CollectiveKind::kAllReduce),
            n == 1 ? 0 : (15 + 1 + 24) * 4);
      });
    }
  }
}

TEST(Coalesced, RefusesNothingAndMixedDtypes) {
  run_ranks(1, [](const World& world) {
    EXPECT_THROW(
        all_reduce_coalesced(world.group(), {}, ReduceOp::kSum), UsageError);
    EXPECT_THROW(
        all_reduce_coalesced(
            world.group(),
            {at::ones({2}), at::ones({2}, at::kInt)},
            ReduceOp::kSum),
        UsageError);
  });
}

TEST(Allocation, ByC10dsConventions) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        2,
        [](const World& world) {
          const auto own = world.group().backend();
          if (!own->supportsTensorAlloc(-1)) {
            return; // libtorch's own backend
          }
          std::vector<at::Tensor> tensors{
              own->allocateTensor(50'000, at::TensorOptions().dtype(at::kInt))};
          tensors[0].fill_(world.rank() + 1);
          own->allreduce(tensors)->wait();
          EXPECT_TRUE(tensors[0].eq(3).all().item<bool>());
          EXPECT_NE(own->getMemAllocator(), nullptr);
        },
        {.backend = backend});
  }
}

} // namespace
} // namespace tessera
