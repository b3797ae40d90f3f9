// SPDX-License-Identifier: Apache-2.0
// Groups on GPUs. Each test says how many GPUs it needs and is skipped where
// there are fewer; ranks are threads, each with its own.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/conformance.h>
#include <tessera/comm/devices.h>
#include <tessera/comm/run_ranks.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using conformance::Memory;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

int64_t gpu_count() {
  return see_devices(c10::kCUDA, 0).count;
}

// A group of all ranks on their GPUs.
Group on_gpus(const World& world, const std::string& name = "gpus") {
  std::vector<int64_t> everyone(static_cast<std::size_t>(world.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  make_current(world.device(c10::kCUDA));
  return world.new_group(everyone, name, c10::kCUDA);
}

at::Tensor ones(const Group& group, int64_t numel) {
  return at::ones(
      {numel}, at::TensorOptions(at::kFloat).device(group.device()));
}

class NcclTest : public testing::Test {
 protected:
  // Runs `fn` for 2, 3 and 4 ranks, as far as there are GPUs.
  static void for_world_sizes(const std::function<void(World)>& fn) {
    for (int64_t ranks = 2; ranks <= std::min<int64_t>(4, gpu_count());
         ++ranks) {
      run_ranks(ranks, fn);
    }
  }
};

#define NEEDS_GPUS(wanted)                                               \
  if (gpu_count() < (wanted)) {                                          \
    GTEST_SKIP() << "needs " << (wanted) << " GPUs, this machine shows " \
                 << gpu_count();                                         \
  }

// Also where there is no GPU: what the plug-in is linked with is found.
TEST_F(NcclTest, ThePluginIsThereWhereLibtorchHasCuda) {
  const bool built = is_built_for(c10::kCUDA);
  const auto open = [] { open_backend("nccl", WorldSetup{}); };
  if (built) {
    EXPECT_NO_THROW(open());
  } else {
    EXPECT_THAT(
        open,
        ThrowsMessage<UsageError>(AllOf(
            HasSubstr("libtessera_nccl.so is not there"),
            HasSubstr("build Tessera against a libtorch with CUDA"))));
  }
}

TEST_F(NcclTest, AGroupOfOneMovesNothing) {
  NEEDS_GPUS(1)
  run_ranks(1, [](World world) {
    const Group group = on_gpus(world);
    EXPECT_EQ(group.backend_name(), "single");
    const at::Tensor in = ones(group, 3);
    const at::Tensor out = at::zeros_like(in);
    group.all_gather(in, out, std::vector<int64_t>{3})->wait();
    EXPECT_TRUE(at::equal(in, out));
  });
}

TEST_F(NcclTest, ThreadsThatWouldShareAGpuAreRefused) {
  NEEDS_GPUS(1)
  if (gpu_count() > 1) {
    GTEST_SKIP() << "each of the threads has a GPU of its own here";
  }
  run_ranks(2, [](World world) {
    EXPECT_THAT(
        [&] { on_gpus(world); },
        ThrowsMessage<UsageError>(AllOf(
            HasSubstr("ranks 0 and 1 share one GPU"),
            HasSubstr("ranks that are threads"))));
    world.group().barrier()->wait(); // the world lives on
  });
}

TEST_F(NcclTest, AgreesWithThePlainModel) {
  NEEDS_GPUS(2)
  for_world_sizes([](World world) {
    const Group group = on_gpus(world);
    EXPECT_EQ(group.backend_name(), "nccl");
    for (const at::ScalarType dtype : conformance::kDtypes) {
      for (const int64_t numel : {0, 1, 1000}) {
        conformance::check_movements(group, numel, dtype, Memory::kUnaligned);
        for (const ReduceOp op : conformance::kOps) {
          if (dtype != at::kBool || op != ReduceOp::kAvg) {
            conformance::check_reductions(group, numel, dtype, op);
          }
        }
      }
    }
    conformance::check_all_to_all(group, 100);
    conformance::check_ring(group);
    conformance::check_large(group);
    group.barrier()->wait();
  });
}

TEST_F(NcclTest, AgreesWithThePlainModelInAnyOrder) {
  NEEDS_GPUS(2)
  for_world_sizes([](World world) {
    on_gpus(world);
    conformance::check_random_sequences(world, 1, 50, c10::kCUDA);
  });
}

TEST_F(NcclTest, RecordsItsCalls) {
  NEEDS_GPUS(2)
  run_ranks(2, [](World world) {
    const Group group = on_gpus(world, "dp");
    group.all_reduce(ones(group, 10), ReduceOp::kSum)->wait();
    EXPECT_EQ(world.record().count(CollectiveKind::kAllReduce, "dp"), 1);
    EXPECT_EQ(world.record().bytes(CollectiveKind::kAllReduce, "dp"), 40);
    EXPECT_EQ(world.record().total_count(), 1) << "its own calls on the CPU";
  });
}

TEST_F(NcclTest, ATensorOnTheCpuIsRefused) {
  NEEDS_GPUS(2)
  run_ranks(2, [](World world) {
    const Group group = on_gpus(world);
    EXPECT_THAT(
        [&] { group.all_reduce(at::ones({2}), ReduceOp::kSum); },
        ThrowsMessage<UsageError>(HasSubstr("tensor on cpu, expected")));
    const at::Tensor tensor = ones(group, 2);
    group.all_reduce(tensor, ReduceOp::kSum)->wait();
    EXPECT_TRUE(tensor.eq(2).all().item<bool>());
  });
}

TEST_F(NcclTest, AMismatchIsAnErrorOnEveryRankInDebugMode) {
  NEEDS_GPUS(2)
  run_ranks(
      2,
      [](World world) {
        const Group group = on_gpus(world, "dp");
        const at::Tensor tensor = ones(group, 3 + world.rank());
        EXPECT_THAT(
            [&] { group.all_reduce(tensor, ReduceOp::kSum)->wait(); },
            ThrowsMessage<PeerError>(AllOf(
                HasSubstr("all_reduce [rank "),
                HasSubstr("group dp, seq 1]"),
                HasSubstr("shapes must match"))));
      },
      {.debug_collectives = true});
}

TEST_F(NcclTest, ARankThatStaysAwayIsNamed) {
  NEEDS_GPUS(2)
  run_ranks(
      2,
      [](World world) {
        const Group group = on_gpus(world);
        group.all_reduce(ones(group, 2), ReduceOp::kSum)->wait();
        if (world.rank() == 1) {
          world.store()->wait({"seen"});
          return;
        }
        const WorkPtr work = group.all_reduce(ones(group, 2), ReduceOp::kSum);
        while (!work->isCompleted()) {
          std::this_thread::yield();
        }
        EXPECT_THAT(
            [&] { work->wait(); },
            ThrowsMessage<TimeoutError>(HasSubstr("rank 1")));
        world.store()->set("seen", "1");
      },
      {.timeout = std::chrono::seconds(5)});
}

} // namespace
} // namespace tessera
