// SPDX-License-Identifier: Apache-2.0
// One step looked at closely: placements, values, the record of collectives,
// memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/record.h>
#include <tessera/optim/gradient_placements.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Tensors;

constexpr GradientSync kModes[] = {
    GradientSync::kImplicit,
    GradientSync::kAllReduce,
    GradientSync::kReduceScatter};

// Whole numbers, so that sums are exact in any order.
at::Tensor whole_numbers(at::IntArrayRef sizes, int64_t seed) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::randint(-8, 9, sizes, generator).to(torch::kFloat);
}

// A parameter with a gradient of the given placements whose local values differ
// from rank to rank.
struct Case {
  std::vector<int64_t> mesh;
  int64_t axis;
  std::vector<int64_t> sizes;
  Placements gradient;
  Placements state; // where state and reduced gradient shall live

  Placements parameter() const {
    Placements result = gradient;
    for (Placement& placement : result) {
      placement = placement.is_partial() ? Placement(Replicate()) : placement;
    }
    return result;
  }
};

DeviceMesh mesh_of(const World& world, const Case& c) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < c.mesh.size(); ++i) {
    axes.push_back({"axis" + std::to_string(i), c.mesh[i]});
  }
  return make_mesh(world, axes);
}

at::Tensor make_parameter(const DeviceMesh& mesh, const Case& c) {
  at::Tensor param =
      testing::distributed_leaf(whole_numbers(c.sizes, 1), mesh, c.parameter());
  const SpecPtr spec =
      intern_contiguous(mesh, c.gradient, c.sizes, c10::kFloat);
  // Ranks that differ on a Replicate axis hold the same numbers.
  int64_t seed = 2;
  for (size_t axis = 0; axis < c.gradient.size(); ++axis) {
    seed = seed * 8 +
        (c.gradient[axis].is_replicate()
             ? 0
             : mesh.coordinate(static_cast<int64_t>(axis)));
  }
  param.mutable_grad() =
      wrap_local(whole_numbers(spec->local_sizes, seed), spec);
  return param;
}

int64_t count(
    const World& world, CollectiveKind kind, std::string_view axis = {}) {
  return world.record().count(kind, axis);
}

// The second fix's examples, with tensor dims that divide and such that do not.
const std::vector<Case> kCases = {
    {{2, 2, 2},
     0,
     {4, 6},
     {Partial(), Partial(), Partial()},
     {Shard(0), Shard(1), Replicate()}},
    {{2, 2, 2},
     0,
     {4, 6},
     {Partial(), Shard(0), Partial()},
     {Shard(1), Shard(0), Replicate()}},
    {{2, 2}, 0, {5, 7}, {Partial(), Shard(1)}, {Shard(0), Shard(1)}},
    {{2, 2}, 1, {5, 7}, {Partial(), Partial()}, {Shard(1), Shard(0)}},
    {{2, 2}, 0, {4}, {Partial(), Shard(0)}, {Replicate(), Shard(0)}},
    {{2, 2}, 0, {4, 6}, {Shard(1), Partial()}, {Shard(1), Shard(0)}},
    {{2, 2}, 0, {4, 6}, {Replicate(), Partial()}, {Replicate(), Shard(0)}},
    {{1, 2}, 1, {4, 6}, {Partial(), Partial()}, {Replicate(), Shard(0)}},
    {{1, 2}, 0, {5}, {Replicate(), Partial()}, {Replicate(), Shard(0)}},
    {{2}, 0, {4}, {Partial()}, {Shard(0)}},
    {{2}, 0, {7}, {Partial()}, {Shard(0)}},
    {{3}, 0, {2, 2}, {Partial()}, {Shard(0)}},
    {{4}, 0, {5, 3}, {Partial()}, {Shard(0)}},
    {{4}, 0, {10}, {Partial(ReduceOp::kAvg)}, {Shard(0)}},
    {{3}, 0, {1, 6}, {Partial()}, {Shard(1)}},
    {{2}, 0, {1, 1}, {Partial()}, {Replicate()}},
    {{2}, 0, {}, {Partial()}, {Replicate()}},
    {{2}, 0, {3, 2}, {Shard(0)}, {Shard(0)}},
    {{2}, 0, {3, 2}, {Replicate()}, {Replicate()}},
    {{1}, 0, {3, 2}, {Partial()}, {Replicate()}},
};

struct Expected {
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;
  int64_t all_gather = 0;
};

// What a step may communicate on one axis.
Expected expected_on(const Case& c, size_t axis, GradientSync sync) {
  const bool moves = c.mesh[axis] > 1 && c.gradient[axis].is_partial();
  const bool shards = moves && c.state[axis].is_shard();
  const bool scatters = shards && sync == GradientSync::kReduceScatter;
  return {scatters, moves && !scatters, shards};
}

void step_and_check(const World& world, const Case& c, GradientSync sync) {
  const DeviceMesh mesh = mesh_of(world, c);
  at::Tensor param = make_parameter(mesh, c);
  const at::Tensor before = full_tensor(param).detach().clone();
  const at::Tensor gradient = full_tensor(param.grad()).detach().clone();
  auto optimizer = shard_optimizer(
      torch::optim::SGD({param}, torch::optim::SGDOptions(0.5).momentum(0.5)),
      ShardingStage1("axis" + std::to_string(c.axis)),
      {sync});
  world.record().reset();
  optimizer.step();
  const auto where =
      spec_of(param.grad())->str() + " " + testing::name_of(sync);
  for (size_t axis = 0; axis < c.mesh.size(); ++axis) {
    const Expected expected = expected_on(c, axis, sync);
    const std::string name = "axis" + std::to_string(axis);
    EXPECT_EQ(
        count(world, CollectiveKind::kReduceScatter, name),
        expected.reduce_scatter)
        << where << " " << name;
    EXPECT_EQ(
        count(world, CollectiveKind::kAllReduce, name), expected.all_reduce)
        << where << " " << name;
    EXPECT_EQ(
        count(world, CollectiveKind::kAllGather, name), expected.all_gather)
        << where << " " << name;
  }
  const at::Tensor reduced = optimizer.reduced_gradient(param);
  const Placements all_reduced = all_reduce_gradient(*spec_of(param.grad()));
  EXPECT_EQ(
      str(placements_of(reduced)),
      str(sync == GradientSync::kAllReduce ? all_reduced : c.state))
      << where;
  EXPECT_EQ(str(placements_of(param.grad())), str(c.gradient))
      << "the gradient itself stays; " << where;
  EXPECT_EQ(str(placements_of(param)), str(c.parameter())) << where;
  const auto& state = static_cast<torch::optim::SGDParamState&>(
      *optimizer.state().at(param.unsafeGetTensorImpl()));
  EXPECT_EQ(str(placements_of(state.momentum_buffer())), str(c.state)) << where;
  EXPECT_TRUE(full_tensor(reduced).equal(gradient)) << where;
  EXPECT_TRUE(full_tensor(state.momentum_buffer()).equal(gradient)) << where;
  EXPECT_TRUE(full_tensor(param).detach().equal(before - 0.5 * gradient))
      << where;
}

int64_t ranks_of(const Case& c) {
  int64_t ranks = 1;
  for (const int64_t size : c.mesh) {
    ranks *= size;
  }
  return ranks;
}

TEST(ShardedStep, ReducesStraightToWhereTheStateLives) {
  for (const Case& c : kCases) {
    run_ranks(ranks_of(c), [&](World world) {
      step_and_check(world, c, GradientSync::kReduceScatter);
    });
  }
}

TEST(ShardedStep, AllReducesWhereAskedTo) {
  for (const Case& c : kCases) {
    run_ranks(ranks_of(c), [&](World world) {
      step_and_check(world, c, GradientSync::kAllReduce);
    });
  }
}

TEST(ShardedStep, LeavesParametersAtRestInEveryMode) {
  for (const Case& c : kCases) {
    run_ranks(ranks_of(c), [&](World world) {
      const DeviceMesh mesh = mesh_of(world, c);
      at::Tensor param = make_parameter(mesh, c);
      const at::Tensor expected = full_tensor(param).detach() -
          0.5 * full_tensor(param.grad()).detach();
      auto optimizer = shard_optimizer(
          torch::optim::SGD(
              {param}, torch::optim::SGDOptions(0.5).momentum(0.5)),
          ShardingStage1("axis" + std::to_string(c.axis)),
          {GradientSync::kImplicit});
      optimizer.step();
      EXPECT_EQ(str(placements_of(param)), str(c.parameter()));
      EXPECT_TRUE(full_tensor(param).detach().equal(expected))
          << spec_of(param.grad())->str();
      const auto& state = static_cast<torch::optim::SGDParamState&>(
          *optimizer.state().at(param.unsafeGetTensorImpl()));
      EXPECT_EQ(str(placements_of(state.momentum_buffer())), str(c.state))
          << spec_of(param.grad())->str();
    });
  }
}

// Six parameters on one axis: four that can be sharded, two that cannot.
struct Optimized {
  Tensors params;
  std::optional<ShardedOptimizer> optimizer;
  int64_t gradient_bytes = 0; // of those that can be sharded
};

const std::vector<std::vector<int64_t>> kShapes = {
    {8, 6}, {5, 3}, {7}, {1, 9}, {}, {1, 1}};
constexpr int64_t kShardable = 4;

Optimized optimized(const World& world, GradientSync sync) {
  const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
  Optimized result;
  for (const auto& sizes : kShapes) {
    result.params.push_back(
        make_parameter(mesh, {{world.size()}, 0, sizes, {Partial()}, {}}));
    result.gradient_bytes += static_cast<int64_t>(sizeof(float)) *
        (result.params.back().numel() > 1 ? result.params.back().numel() : 0);
  }
  result.optimizer.emplace(shard_optimizer(
      torch::optim::AdamW(result.params, 0.1), ShardingStage1("dp"), {sync}));
  return result;
}

TEST(ShardedStep, ReduceScatterModeMovesEachGradientOnce) {
  for (const int64_t ranks : {2, 3, 4}) {
    run_ranks(ranks, [](World world) {
      auto [params, optimizer, bytes] =
          optimized(world, GradientSync::kReduceScatter);
      world.record().reset();
      optimizer->clip_grad_norm(1.0);
      optimizer->step();
      const Record& record = world.record();
      EXPECT_EQ(record.count(CollectiveKind::kReduceScatter), kShardable);
      EXPECT_EQ(record.bytes(CollectiveKind::kReduceScatter), bytes);
      EXPECT_EQ(record.count(CollectiveKind::kAllGather), kShardable);
      EXPECT_EQ(record.bytes(CollectiveKind::kAllGather), bytes);
      // The norm's float64, and the two gradients of one element.
      EXPECT_EQ(record.count(CollectiveKind::kAllReduce), 3);
      EXPECT_EQ(record.bytes(CollectiveKind::kAllReduce), 8 + 2 * 4);
      EXPECT_EQ(
          record.count(CollectiveKind::kAllReduce, {}, "optimizer.clip"), 1);
      EXPECT_EQ(
          record.count(CollectiveKind::kReduceScatter, "dp", "optimizer.sync"),
          kShardable);
      EXPECT_EQ(
          record.count(CollectiveKind::kAllGather, "dp", "optimizer.step"),
          kShardable);
      EXPECT_EQ(record.total_count(), 2 * kShardable + 3);
    });
  }
}

TEST(ShardedStep, AllReduceModeMovesEachGradientOnce) {
  run_ranks(3, [](World world) {
    auto [params, optimizer, bytes] =
        optimized(world, GradientSync::kAllReduce);
    world.record().reset();
    optimizer->clip_grad_norm(1.0);
    optimizer->step();
    const Record& record = world.record();
    EXPECT_EQ(
        record.count(CollectiveKind::kAllReduce, "dp", "optimizer.sync"),
        std::ssize(kShapes));
    EXPECT_EQ(
        record.bytes(CollectiveKind::kAllReduce, "dp", "optimizer.sync"),
        bytes + 2 * 4);
    EXPECT_EQ(record.count(CollectiveKind::kAllGather), kShardable);
    EXPECT_EQ(
        record.count(CollectiveKind::kAllReduce, {}, "optimizer.clip"), 1);
    EXPECT_EQ(record.count(CollectiveKind::kReduceScatter), 0);
    EXPECT_EQ(record.total_count(), std::ssize(kShapes) + kShardable + 1);
  });
}

// What nobody cares for costs a reduction per read. The norm is not linear, so
// it reads an all-reduced gradient; scaling is, so it leaves it Partial; the
// fused update reads it again and wants it where the state lives.
TEST(ShardedStep, ImplicitModeReducesAtEachRead) {
  for (const int64_t ranks : {2, 3, 4}) {
    run_ranks(ranks, [](World world) {
      auto [params, optimizer, bytes] =
          optimized(world, GradientSync::kImplicit);
      const int64_t single = std::ssize(kShapes) - kShardable;
      const Record& record = world.record();
      world.record().reset();
      optimizer->clip_grad_norm(1.0);
      EXPECT_EQ(record.count(CollectiveKind::kAllReduce), std::ssize(kShapes));
      EXPECT_EQ(record.bytes(CollectiveKind::kAllReduce), bytes + 4 * single);
      EXPECT_EQ(record.total_count(), std::ssize(kShapes));
      world.record().reset();
      optimizer->step();
      EXPECT_EQ(record.count(CollectiveKind::kReduceScatter), kShardable);
      EXPECT_EQ(record.bytes(CollectiveKind::kReduceScatter), bytes);
      EXPECT_EQ(record.count(CollectiveKind::kAllReduce), single);
      EXPECT_EQ(record.count(CollectiveKind::kAllGather), kShardable);
      EXPECT_EQ(record.total_count(), 2 * kShardable + single);
    });
  }
}

// Whichever collectives the cost model takes, placements and values are the
// same.
TEST(ShardedStep, PlacesGradientsOverGlooAsOverSharedMemory) {
  const auto step = [](World world) {
    auto [params, optimizer, bytes] =
        optimized(world, GradientSync::kReduceScatter);
    optimizer->step();
    const std::vector<std::string> expected = {
        "[S0]", "[S0]", "[S0]", "[S1]", "[R]", "[R]"};
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor reduced = optimizer->reduced_gradient(params[i]);
      EXPECT_EQ(str(placements_of(reduced)), expected[i]);
      EXPECT_TRUE(full_tensor(reduced).equal(full_tensor(params[i].grad())));
    }
  };
  run_ranks(3, step, {.backend = "gloo"});
}

TEST(ShardedStep, HoldsItsShareOfTheStates) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      at::Tensor weight =
          make_parameter(mesh, {{world.size()}, 0, {120, 60}, {Partial()}, {}});
      at::Tensor bias =
          make_parameter(mesh, {{world.size()}, 0, {240}, {Partial()}, {}});
      auto optimizer = shard_optimizer(
          torch::optim::AdamW({weight, bias}, 0.1), ShardingStage1("dp"));
      EXPECT_EQ(optimizer.state_bytes(), 0);
      optimizer.step();
      const double share = 2.0 * sizeof(float) *
          static_cast<double>(weight.numel() + bias.numel()) /
          static_cast<double>(world.size());
      EXPECT_NEAR(
          static_cast<double>(optimizer.state_bytes()) / share, 1, 0.01);
    });
  }
}

TEST(ShardedStep, ReducesAGradientOnce) {
  run_ranks(2, [](World world) {
    auto [params, optimizer, bytes] =
        optimized(world, GradientSync::kReduceScatter);
    const double norm = optimizer->clip_grad_norm(1e9);
    world.record().reset();
    EXPECT_DOUBLE_EQ(optimizer->clip_grad_norm(1e9), norm);
    optimizer->step();
    optimizer->step();
    EXPECT_EQ(world.record().count(CollectiveKind::kReduceScatter), 0);
    EXPECT_EQ(world.record().count(CollectiveKind::kAllReduce), 1);
  });
}

TEST(ShardedStep, ReducesAGradientAgainThatWasWrittenTo) {
  run_ranks(2, [](World world) {
    auto [params, optimizer, bytes] =
        optimized(world, GradientSync::kReduceScatter);
    const double norm = optimizer->clip_grad_norm(1e9);
    for (const at::Tensor& param : params) {
      const c10::NoGradGuard no_grad;
      param.grad().mul_(2);
      EXPECT_FALSE(optimizer->reduced_gradient(param).defined());
    }
    world.record().reset();
    EXPECT_NEAR(optimizer->clip_grad_norm(1e9), 2 * norm, 1e-9 * norm);
    EXPECT_EQ(world.record().count(CollectiveKind::kReduceScatter), kShardable);
  });
}

TEST(ShardedStep, UsesTheSameGradientInASecondStepAsTorchDoes) {
  for (const GradientSync sync : kModes) {
    run_ranks(2, [sync](World world) {
      auto [params, optimizer, bytes] = optimized(world, sync);
      Tensors plain;
      for (const at::Tensor& param : params) {
        plain.push_back(testing::leaf(full_tensor(param)));
        plain.back().mutable_grad() =
            full_tensor(param.grad()).detach().clone();
      }
      torch::optim::AdamW reference(plain, 0.1);
      const double norm = optimizer->clip_grad_norm(2.0);
      EXPECT_NEAR(
          torch::nn::utils::clip_grad_norm_(plain, 2.0), norm, 1e-6 * norm);
      for (int step = 0; step < 2; ++step) {
        optimizer->step();
        reference.step();
      }
      for (size_t i = 0; i < params.size(); ++i) {
        EXPECT_TRUE(full_tensor(params[i]).allclose(plain[i], 1e-5, 1e-6))
            << testing::name_of(sync) << " " << i;
      }
    });
  }
}

// A parameter whose memory is column-major: the kernel ignores strides, so it
// must not see it as it is.
TEST(ShardedStep, UpdatesAColumnMajorParameter) {
  for (const GradientSync sync : kModes) {
    run_ranks(2, [sync](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      const at::Tensor value = whole_numbers({6, 4}, 1);
      const at::Tensor x = whole_numbers({4, 6}, 2);
      at::Tensor param = testing::distributed_leaf(value, mesh, {Replicate()})
                             .t()
                             .detach()
                             .set_requires_grad(true);
      at::Tensor plain = value.t()
                             .detach()
                             .clone(at::MemoryFormat::Preserve)
                             .set_requires_grad(true);
      auto optimizer = shard_optimizer(
          torch::optim::AdamW({param}, 0.1), ShardingStage1("dp"), {sync});
      torch::optim::AdamW reference({plain}, 0.1);
      for (int step = 0; step < 3; ++step) {
        (param * distribute(x, mesh, {Shard(0)})).square().sum().backward();
        (plain * x).square().sum().backward();
        optimizer.step();
        reference.step();
      }
      EXPECT_TRUE(full_tensor(param).allclose(plain, 1e-5, 1e-6))
          << testing::name_of(sync);
    });
  }
}

} // namespace
} // namespace tessera
