// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/dtensor/redistribute.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;

// Negative numbers, zero and positive ones.
at::Tensor values(at::IntArrayRef sizes) {
  return test_tensors::range(sizes) - 3;
}

Placements all_placements(int64_t dims) {
  Placements result{Replicate{}};
  for (const ReduceOp op :
       {ReduceOp::kSum,
        ReduceOp::kAvg,
        ReduceOp::kMin,
        ReduceOp::kMax,
        ReduceOp::kProduct}) {
    result.emplace_back(Partial(op));
  }
  for (int64_t d = 0; d < dims; ++d) {
    result.emplace_back(Shard(d));
  }
  return result;
}

class RedistributeOn : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, RedistributeOn, testing::Values(1, 2, 3, 4));

TEST_P(RedistributeOn, EveryPairOnOneAxisKeepsTheValue) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{5, 3}, {10}, {1, 4}, {0, 2}}) {
      const at::Tensor value = values(shape);
      const Placements kinds =
          all_placements(static_cast<int64_t>(shape.size()));
      for (const Placement& from : kinds) {
        for (const Placement& to : kinds) {
          const at::Tensor x = distribute(value, mesh, {from});
          const at::Tensor y = redistribute(x, {to});
          EXPECT_EQ(placements_of(y), Placements{to});
          EXPECT_TRUE(torch::allclose(full_tensor(y), value))
              << from.str() << " -> " << to.str();
          EXPECT_FALSE(
              value.numel() > 0 && local_of(y).numel() > 0 &&
              local_of(y).is_alias_of(local_of(x)))
              << from.str() << " -> " << to.str();
        }
      }
    }
  });
}

TEST_P(RedistributeOn, GradientsComeBackInTheInputsPlacements) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor value = values({5, 3});
    const at::Tensor weight = values({5, 3}) * 2;
    for (const Placement& from : all_placements(2)) {
      for (const Placement& to : all_placements(2)) {
        const at::Tensor x = distribute(value, mesh, {from}).requires_grad_();
        const at::Tensor w = distribute(weight, mesh, {Replicate{}});
        (redistribute(x, {to}) * w).sum().backward();
        EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), weight))
            << from.str() << " -> " << to.str();
        if (from.is_shard()) {
          EXPECT_EQ(placements_of(x.grad()), Placements{from});
        }
        if (from.is_partial()) {
          EXPECT_TRUE(placements_of(x.grad())[0].is_replicate());
        }
      }
    }
  });
}

TEST(Redistribute, SeveralMayBePendingAtOnce) {
  for (const char* backend : {"shm", "gloo"}) {
    RunRanksOptions options;
    options.backend = backend;
    run_ranks(
        3,
        [](World world) {
          const DeviceMesh mesh = make_mesh(world, {{"dp", 3}});
          const at::Tensor value = values({5, 3});
          std::vector<PendingTensor> pending;
          for (int64_t i = 0; i < 4; ++i) {
            const at::Tensor x =
                distribute(value * static_cast<double>(i), mesh, {Partial{}});
            const Placement to =
                i % 2 == 0 ? Placement(Shard(1)) : Placement(Replicate{});
            pending.push_back(redistribute_async(x, {to}));
          }
          for (size_t i = 0; i < pending.size(); ++i) {
            EXPECT_TRUE(torch::allclose(
                full_tensor(pending[i].wait()),
                value * static_cast<double>(i)));
          }
        },
        options);
  }
}

TEST(Redistribute, CountsOneCollectivePerStep) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    const at::Tensor x = distribute(values({6, 3}), mesh, {Partial{}});
    world.record().reset();
    const at::Tensor shard = redistribute(x, {Shard(0)});
    EXPECT_EQ(world.record().count(CollectiveKind::kReduceScatter, "dp"), 1);
    EXPECT_EQ(world.record().bytes(CollectiveKind::kReduceScatter), 72);
    const at::Tensor other = redistribute(shard, {Shard(1)});
    EXPECT_EQ(world.record().count(CollectiveKind::kAllToAll, "dp"), 1);
    const at::Tensor whole = redistribute(other, {Replicate{}});
    EXPECT_EQ(world.record().count(CollectiveKind::kAllGather, "dp"), 1);
    EXPECT_EQ(world.record().bytes(CollectiveKind::kAllGather), 72);
    EXPECT_EQ(world.record().total_count(), 3);
  });
}

// seed.md: local tensors arange(10) + rank on two ranks as one of 20.
TEST(FromLocal, MaskedMeansOfLocalParts) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    const at::Tensor local =
        torch::arange(10, torch::kFloat) + static_cast<double>(world.rank());
    const at::Tensor x = from_local(local, mesh, {Shard(0)});
    EXPECT_EQ(x.sizes(), (std::vector<int64_t>{20}));
    const at::Tensor mine = to_local(x);
    const at::Tensor mean = world.rank() == 0 ? mine.slice(0, 1, 3).mean()
                                              : mine.slice(0, 4, 7).mean();
    EXPECT_EQ(mean.item<float>(), world.rank() == 0 ? 1.5F : 6.0F);
    EXPECT_EQ(from_local(mean, mesh, {Partial{}}).item<float>(), 7.5F);
  });
}

TEST(FromLocal, InfersUnevenGlobalShapes) {
  run_ranks(4, [](World world) {
    const DeviceMesh line = make_mesh(world, {{"dp", 4}});
    const int64_t rows =
        std::vector<int64_t>{2, 2, 1, 0}[static_cast<size_t>(world.rank())];
    EXPECT_EQ(
        from_local(torch::ones({rows, 3}), line, {Shard(0)}).sizes(),
        (std::vector<int64_t>{5, 3}));
    const DeviceMesh grid = make_mesh(world, {{"x", 2}, {"y", 2}});
    const int64_t nested =
        std::vector<int64_t>{3, 2, 3, 2}[static_cast<size_t>(world.rank())];
    EXPECT_EQ(
        from_local(torch::ones({nested}), grid, {Shard(0), Shard(0)}).sizes(),
        (std::vector<int64_t>{10}));
    EXPECT_EQ(
        from_local(torch::ones({2, 3}), grid, {Shard(1), Partial{}}).sizes(),
        (std::vector<int64_t>{2, 6}));
  });
}

TEST(InferenceMode, BuildsNothingForBackward) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    const at::Tensor w =
        distribute(values({3, 3}), mesh, {Replicate{}}).requires_grad_();
    at::Tensor y;
    {
      c10::InferenceMode guard;
      const at::Tensor x = distribute(values({4, 3}), mesh, {Shard(0)});
      y = torch::linear(x, w).view({2, 2, 3}).relu_().sum();
      EXPECT_FALSE(y.requires_grad());
    }
    const at::Tensor expected =
        torch::linear(values({4, 3}), values({3, 3})).relu().sum();
    EXPECT_EQ(y.item<float>(), expected.item<float>());
  });
}

} // namespace
} // namespace tessera
