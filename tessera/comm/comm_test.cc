// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/conformance.h>
#include <tessera/comm/run_ranks.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <future>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using namespace conformance;

class OnEveryWorld : public testing::TestWithParam<int64_t> {};

INSTANTIATE_TEST_SUITE_P(Sizes, OnEveryWorld, testing::Values(1, 2, 3, 4, 5));

TEST_P(OnEveryWorld, ReductionsOverShm) {
  run_ranks(GetParam(), [](World world) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const ReduceOp op : kOps) {
        if (dtype == at::kBool && op == ReduceOp::kAvg) {
          continue;
        }
        for (const int64_t numel : {0, 1, 7, 1000, 20001}) {
          check_reductions(world.group(), numel, dtype, op);
        }
        check_reductions(world.group(), 9001, dtype, op, Memory::kUnaligned);
      }
    }
  });
}

TEST_P(OnEveryWorld, RandomSequencesOverShm) {
  run_ranks(GetParam(), [](const World& world) {
    check_random_sequences(world, 0, 200);
  });
}

TEST_P(OnEveryWorld, RandomSequencesOverGloo) {
  run_ranks(
      GetParam(),
      [](const World& world) { check_random_sequences(world, 1000, 200); },
      {.backend = "gloo"});
}

TEST_P(OnEveryWorld, ReductionsLargerThanTheWindowOverShm) {
  run_ranks(GetParam(), [](World world) {
    for (const at::ScalarType dtype :
         {at::kFloat, at::kBFloat16, at::kDouble, at::kByte}) {
      check_reductions(world.group(), 700'001, dtype, ReduceOp::kSum);
    }
  });
}

TEST_P(OnEveryWorld, MovementsOverShm) {
  run_ranks(GetParam(), [](World world) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const int64_t numel : {0, 1, 7, 1000, 300'007}) {
        check_movements(world.group(), numel, dtype);
      }
    }
    for (const int64_t scale : {0, 1, 5, 100'003}) {
      check_all_to_all(world.group(), scale);
    }
    world.group().barrier()->wait();
  });
}

TEST_P(OnEveryWorld, EverythingOverGloo) {
  run_ranks(
      GetParam(),
      [](World world) {
        for (const at::ScalarType dtype : kDtypes) {
          check_reductions(
              world.group(),
              7,
              dtype,
              dtype == at::kBool ? ReduceOp::kMax : ReduceOp::kAvg);
          check_reductions(world.group(), 33'001, dtype, ReduceOp::kSum);
          check_movements(world.group(), 1000, dtype);
        }
        for (const ReduceOp op : kOps) {
          check_reductions(world.group(), 0, at::kFloat, op);
          check_reductions(world.group(), 1001, at::kFloat, op);
        }
        for (const int64_t scale : {0, 1, 50'003}) {
          check_all_to_all(world.group(), scale);
        }
        world.group().barrier()->wait();
      },
      {.backend = "gloo"});
}

TEST_P(OnEveryWorld, EverythingOverGlooInTheDebugMode) {
  run_ranks(
      GetParam(),
      [](World world) {
        check_reductions(world.group(), 1001, at::kBFloat16, ReduceOp::kSum);
        check_movements(world.group(), 1000, at::kInt);
        check_all_to_all(world.group(), 5);
        if (world.size() > 1) {
          check_ring(world.group());
        }
        check_random_sequences(world, 1, 3);
        world.group().barrier()->wait();
      },
      {.backend = "gloo", .debug_collectives = true});
}

TEST(Group, ManyCollectivesInFlightOverGlooKeepTheirOrder) {
  for (const int64_t n : {2, 3}) {
    run_ranks(
        n,
        [n](World world) {
          std::vector<at::Tensor> tensors;
          std::vector<WorkPtr> works;
          for (int64_t i = 0; i < 40; ++i) {
            tensors.push_back(
                at::full({20'000 + i}, i + world.rank(), at::kFloat));
            works.push_back(
                world.group().all_reduce(tensors.back(), ReduceOp::kSum));
          }
          for (int64_t i = 39; i >= 0; --i) { // waiting in any order
            works[static_cast<std::size_t>(i)]->wait();
            const auto sum = static_cast<float>(i * n + n * (n - 1) / 2);
            EXPECT_TRUE(tensors[static_cast<std::size_t>(i)]
                            .eq(sum)
                            .all()
                            .item<bool>());
          }
        },
        {.backend = "gloo"});
  }
}

TEST(Group, MessagesPassAroundARing) {
  for (const int64_t n : {2, 3, 4}) {
    run_ranks(n, [](const World& world) { check_ring(world.group()); });
  }
  run_ranks(
      3,
      [](const World& world) { check_ring(world.group()); },
      {.backend = "gloo"});
}

TEST(Group, MessagesAreMatchedByTag) {
  run_ranks(2, [](World world) {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int tag = 0; tag < 5; ++tag) {
      const bool sends = world.rank() == 0;
      const int own = sends ? tag : 4 - tag; // received in the opposite order
      tensors.push_back(at::full({50'000}, sends ? own : -1, at::kInt));
      works.push_back(
          sends ? world.group().send(tensors.back(), 1, own)
                : world.group().recv(tensors.back(), 0, own));
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      const int expected =
          world.rank() == 0 ? static_cast<int>(i) : 4 - static_cast<int>(i);
      EXPECT_TRUE(tensors[i].eq(expected).all().item<bool>());
    }
  });
}

TEST(Group, MessagesMoveWhileTheSenderWaitsInACollective) {
  run_ranks(2, [](World world) {
    at::Tensor x =
        world.rank() == 0 ? at::ones({1'000'000}) : at::zeros({1'000'000});
    WorkPtr work =
        world.rank() == 0 ? world.group().send(x, 1) : world.group().recv(x, 0);
    if (world.rank() == 1) {
      work->wait();
      EXPECT_TRUE(x.eq(1).all().item<bool>());
    }
    world.group().barrier()->wait();
    work->wait();
  });
}

TEST(Group, OneThreadWaitsForAMessageWhileAnotherReduces) {
  run_ranks(2, [](World world) {
    const bool sends = world.rank() == 0;
    const auto pause = [](int ms) { // else the test is merely easier
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    };
    at::Tensor x = at::full({1'000'000}, sends ? 1 : 0, at::kFloat);
    pause(sends ? 30 : 0); // the other one waits in both threads by then
    WorkPtr work = sends ? world.group().send(x, 1) : world.group().recv(x, 0);
    auto waiting = std::async(std::launch::async, [&work] { work->wait(); });
    pause(sends ? 0 : 10);
    at::Tensor y = at::ones({10'000});
    for (int i = 0; i < 5; ++i) {
      world.group().all_reduce(y, ReduceOp::kSum)->wait();
    }
    waiting.get();
    EXPECT_TRUE(x.eq(1).all().item<bool>());
    EXPECT_TRUE(y.eq(32).all().item<bool>());
  });
}

// aluminum 182: ranks that look at their work at different times.
TEST(Group, RanksMayWaitLateOrOnlyPoll) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        3,
        [](World world) {
          at::Tensor x = at::ones({300'000});
          WorkPtr work = world.group().all_reduce(x, ReduceOp::kSum);
          if (world.rank() == 0) {
            work->wait();
          } else if (world.rank() == 1) {
            while (!work->isCompleted()) {
              std::this_thread::yield();
            }
            EXPECT_TRUE(work->isSuccess());
          } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            work->wait();
          }
          EXPECT_TRUE(x.eq(3).all().item<bool>());
          world.group().barrier()->wait();
        },
        {.backend = backend});
  }
}

TEST(Group, SumsHaveTheSameBitsOnAllRanksAndRuns) {
  std::vector<at::Tensor> results(8);
  for (std::size_t run = 0; run < 2; ++run) {
    run_ranks(4, [&results, run](World world) {
      at::Tensor x = at::sin(
          at::arange(200'001, at::kFloat) *
          static_cast<double>(world.rank() + 1));
      world.group().all_reduce(x, ReduceOp::kSum)->wait();
      results[run * 4 + static_cast<std::size_t>(world.rank())] = x;
    });
  }
  for (const at::Tensor& result : results) {
    EXPECT_TRUE(at::equal(result, results[0]));
  }
}

TEST(Group, MinAndMaxPassNanOn) {
  run_ranks(2, [](World world) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      at::Tensor x = at::zeros({2});
      x[world.rank()] = std::numeric_limits<float>::quiet_NaN();
      world.group().all_reduce(x, op)->wait();
      EXPECT_TRUE(x.isnan().all().item<bool>());
    }
  });
}

TEST(Group, SubgroupsRunSideBySide) {
  run_ranks(4, [](World world) {
    const bool even = world.rank() % 2 == 0;
    const Group pair =
        world.new_group(even ? Counts{0, 2} : Counts{1, 3}, "parity");
    EXPECT_EQ(pair.size(), 2);
    EXPECT_EQ(pair.rank(), world.rank() / 2);
    at::Tensor x = at::full({1000}, world.rank(), at::kFloat);
    pair.all_reduce(x, ReduceOp::kSum)->wait();
    EXPECT_TRUE(x.eq(even ? 2 : 4).all().item<bool>());
    EXPECT_EQ(world.record().count(CollectiveKind::kAllReduce, "parity"), 1);
  });
}

TEST(Group, PlainC10dCallsWork) {
  run_ranks(3, [](World world) {
    const auto backend = world.group().backend();
    EXPECT_EQ(backend->getBackendName(), "shm");
    std::vector<at::Tensor> tensors{at::ones({4})};
    backend->allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].eq(3).all().item<bool>());
    std::vector<std::vector<at::Tensor>> outputs{
        {at::zeros({4}), at::zeros({4}), at::zeros({4})}};
    backend->allgather(outputs, tensors)->wait();
    EXPECT_TRUE(at::equal(outputs[0][2], tensors[0]));
    at::Tensor in = at::arange(6, at::kFloat);
    at::Tensor out = at::zeros({2});
    backend->_reduce_scatter_base(out, in)->wait();
    EXPECT_TRUE(at::equal(out, in.narrow(0, 2 * world.rank(), 2) * 3));
    at::Tensor taken = at::zeros({6});
    std::vector<int64_t> none;
    backend->alltoall_base(taken, in, none, none)->wait();
    EXPECT_TRUE(
        at::equal(taken, in.narrow(0, 2 * world.rank(), 2).repeat({3})));
  });
}

TEST(Group, AGroupOfOneMovesNothingAndRecordsNothing) {
  run_ranks(1, [](World world) {
    EXPECT_EQ(world.group().backend_name(), "single");
    at::Tensor x = at::arange(4, at::kFloat);
    at::Tensor out = at::zeros({4});
    world.group().all_reduce(x, ReduceOp::kAvg)->wait();
    world.group().reduce_scatter(x, out, Counts{4}, ReduceOp::kSum)->wait();
    EXPECT_TRUE(at::equal(x, out));
    EXPECT_EQ(world.record().total_count(), 0);
  });
}

TEST(Group, RefusesWhatItCannotMove) {
  run_ranks(2, [](World world) {
    const at::Tensor x = at::ones({4, 4});
    const Group& group = world.group();
    EXPECT_THROW(
        group.all_reduce(x.t().slice(0, 0, 2), ReduceOp::kSum), UsageError);
    EXPECT_THROW(
        group.all_reduce(x.to(at::kComplexFloat), ReduceOp::kSum), UsageError);
    EXPECT_THROW(group.all_reduce(x.to(at::kBool), ReduceOp::kAvg), UsageError);
    EXPECT_THROW(
        group.reduce_scatter(x, at::empty({3}), Counts{8, 9}, ReduceOp::kSum),
        UsageError);
    EXPECT_THROW(group.all_gather(x, x, Counts{16, 16}), UsageError);
    EXPECT_THROW(group.broadcast(x, 2), UsageError);
    EXPECT_THROW(group.send(x, world.rank()), UsageError);
    EXPECT_THROW(world.new_group(Counts{0, 0}, "twice"), UsageError);
    EXPECT_THROW(world.new_group(Counts{5, 0}, "far"), UsageError);
    group.barrier()->wait(); // a refused call leaves the group as it was
  });
}

} // namespace
} // namespace tessera
