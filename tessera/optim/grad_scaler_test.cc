// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/optim/grad_scaler.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <limits>

namespace tessera {
namespace {

using testing::Model;
using testing::Rule;
using testing::Tensors;

struct Holder : torch::nn::Module {
  explicit Holder(const Tensors& params) {
    for (size_t i = 0; i < params.size(); ++i) {
      register_parameter(fmt::format("p{}", i), params[i]);
    }
  }
};

struct Job {
  Job(const World& world,
      c10::ScalarType type = torch::kFloat,
      const ShardingStage& stage = ShardingStage1("dp"),
      const ShardOptions& options = {.bucket_bytes = 200})
      : mesh(make_mesh(world, {{"dp", world.size()}})), dtype(type) {
    for (const at::Tensor& value : model.values) {
      params.push_back(
          testing::distributed_leaf(value.to(type), mesh, {Replicate()}));
    }
    optimizer.emplace(
        testing::sharded_optimizer(Rule::kAdamW, params, stage, options));
  }

  at::Tensor loss(uint64_t seed) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const at::Tensor batch = torch::rand({12, 10}, generator).to(dtype);
    return model.forward(params, distribute(batch, mesh, {Shard(0)})).sum();
  }
  // A gradient that is not finite on one rank alone.
  void spoil(const World& world, int64_t rank) {
    if (world.rank() == rank) {
      local_of(params[2].grad())[0][3].fill_(
          std::numeric_limits<float>::infinity());
    }
    params[2].grad().mul_(1); // ranks write alike
  }
  Tensors values() const {
    Tensors values;
    for (const at::Tensor& param : params) {
      values.push_back(full_tensor(param).detach().clone());
    }
    return values;
  }

  Model model = testing::uneven_mlp();
  DeviceMesh mesh;
  c10::ScalarType dtype;
  Tensors params;
  std::optional<ShardedOptimizer> optimizer;
};

void expect_equal(const Tensors& got, const Tensors& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(got[i].equal(expected[i])) << "parameter " << i;
  }
}

void expect_equal(const OptimizerState& got, const OptimizerState& expected) {
  EXPECT_EQ(got.size(), expected.size());
  for (const auto& [name, state] : expected) {
    EXPECT_EQ(got.at(name).steps, state.steps) << name;
    for (const auto& [field, tensor] : state.tensors) {
      EXPECT_TRUE(got.at(name).tensors.at(field).equal(tensor))
          << name << " " << field;
    }
  }
}

class Scaler : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Scaler, ::testing::Values(1, 2, 3, 4));

// Powers of two change no bits, so neither may scaling.
TEST_P(Scaler, ScaledStepsAreTheUnscaledOnesAtTheSameCost) {
  run_ranks(GetParam(), [](World world) {
    for (const int stage : {1, 2}) {
      for (const bool clips : {false, true}) {
        Job plain(world, torch::kFloat, ShardingStage{"dp", stage});
        Job scaled(world, torch::kFloat, ShardingStage{"dp", stage});
        GradScaler scaler;
        for (uint64_t step = 0; step < 4; ++step) {
          plain.optimizer->zero_grad();
          plain.loss(step).backward();
          world.record().reset();
          const double norm = clips ? plain.optimizer->clip_grad_norm(0.5) : 0;
          plain.optimizer->step();
          const int64_t count = world.record().total_count();
          const int64_t bytes =
              world.record().bytes(CollectiveKind::kAllReduce);

          scaled.optimizer->zero_grad();
          scaler.scale(scaled.loss(step)).backward();
          world.record().reset();
          if (clips) {
            scaler.unscale(*scaled.optimizer);
            EXPECT_DOUBLE_EQ(scaled.optimizer->clip_grad_norm(0.5), norm);
          }
          EXPECT_TRUE(scaler.step(*scaled.optimizer));
          scaler.update();
          EXPECT_EQ(world.record().total_count(), count);
          EXPECT_EQ(world.record().bytes(CollectiveKind::kAllReduce), bytes);
        }
        expect_equal(scaled.values(), plain.values());
      }
    }
  });
}

TEST_P(Scaler, OverflowOnOneRankSkipsOnAll) {
  run_ranks(GetParam(), [](World world) {
    for (const bool one_pass : {false, true}) {
      for (const bool clips : {false, true}) {
        const ShardOptions options{.bucket_bytes = 200, .one_pass = one_pass};
        Job job(world, torch::kFloat, ShardingStage1("dp"), options);
        Job reference(world, torch::kFloat, ShardingStage1("dp"), options);
        GradScaler scaler;
        for (uint64_t step = 0; step < 4; ++step) {
          job.optimizer->zero_grad();
          scaler.scale(job.loss(step)).backward();
          const bool spoilt = step == 2;
          const Tensors before = job.values();
          const auto state = job.optimizer->state_dict(Holder(job.params));
          if (spoilt) {
            job.spoil(world, world.size() - 1);
          }
          world.record().reset();
          if (clips) {
            scaler.unscale(*job.optimizer);
            job.optimizer->clip_grad_norm(0.5);
          }
          EXPECT_EQ(scaler.step(*job.optimizer), !spoilt);
          if (spoilt) {
            EXPECT_EQ(world.record().count(CollectiveKind::kAllGather), 0);
            EXPECT_EQ(
                world.record().count(CollectiveKind::kAllReduce),
                world.size() > 1 ? 1 : 0);
            expect_equal(job.values(), before);
            expect_equal(job.optimizer->state_dict(Holder(job.params)), state);
          } else {
            reference.optimizer->zero_grad();
            scaler.scale(reference.loss(step)).backward();
            reference.optimizer->unscale(scaler.scale());
            if (clips) {
              reference.optimizer->clip_grad_norm(0.5);
            }
            EXPECT_TRUE(reference.optimizer->step_if_finite());
          }
          scaler.update();
          EXPECT_EQ(scaler.scale(), step < 2 ? 65536 : 32768);
        }
        expect_equal(job.values(), reference.values());
      }
    }
  });
}

// With masters, gradients that float16 cannot hold are found where they are.
TEST_P(Scaler, Float16BacksOffUntilGradientsFit) {
  run_ranks(GetParam(), [](World world) {
    for (const int stage : {1, 2}) {
      Job job(world, torch::kHalf, ShardingStage{"dp", stage});
      GradScaler scaler({.init_scale = 0x1p30});
      const Tensors before = job.values();
      int64_t stepped = 0;
      for (uint64_t step = 0; step < 30; ++step) {
        job.optimizer->zero_grad();
        scaler.scale(job.loss(step)).backward();
        stepped += scaler.step(*job.optimizer) ? 1 : 0;
        if (step == 0) {
          expect_equal(job.values(), before);
        }
        scaler.update();
      }
      EXPECT_GT(stepped, 5);
      EXPECT_LT(stepped, 30);
      for (const at::Tensor& value : job.values()) {
        EXPECT_TRUE(value.isfinite().all().item<bool>());
      }
      const auto state = job.optimizer->state_dict(Holder(job.params));
      EXPECT_EQ(state.at("p0").steps, stepped);
    }
  });
}

TEST(GradScaler, GrowsAndBacksOffAsTorchDoes) {
  run_ranks(1, [](World world) {
    Job job(world);
    GradScaler scaler({.init_scale = 8, .growth_interval = 2});
    const auto step = [&](bool good) {
      job.optimizer->zero_grad();
      scaler.scale(job.loss(1)).backward();
      if (!good) {
        job.spoil(world, 0);
      }
      scaler.step(*job.optimizer);
      scaler.update();
      return scaler.scale();
    };
    EXPECT_EQ(step(true), 8);
    EXPECT_EQ(step(true), 16);
    EXPECT_EQ(step(true), 16);
    EXPECT_EQ(step(false), 8); // the count begins anew
    EXPECT_EQ(step(true), 8);
    EXPECT_EQ(scaler.state().growth_tracker, 1);
    GradScaler other({.growth_interval = 2});
    other.load_state(scaler.state());
    EXPECT_EQ(other.scale(), 8);
    EXPECT_EQ(step(true), 16);
    scaler.update(4.0);
    EXPECT_EQ(scaler.scale(), 4);
  });
}

TEST(GradScaler, DisabledIsNotThere) {
  run_ranks(2, [](World world) {
    Job job(world);
    GradScaler scaler({.enabled = false});
    const at::Tensor loss = job.loss(1);
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    scaler.unscale(*job.optimizer);
    EXPECT_TRUE(scaler.step(*job.optimizer));
    scaler.update();
    EXPECT_EQ(scaler.scale(), 1);
  });
}

TEST(GradScaler, RefusesWhatIsOutOfOrderOrRange) {
  EXPECT_THROW(GradScaler({.init_scale = 0}), UsageError);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), UsageError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), UsageError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), UsageError);
  EXPECT_THROW(GradScaler().load_state({-1, 0}), UsageError);
  EXPECT_THROW(GradScaler().update(), UsageError);
  run_ranks(1, [](World world) {
    Job job(world);
    GradScaler scaler;
    scaler.scale(job.loss(1)).backward();
    scaler.unscale(*job.optimizer);
    EXPECT_THROW(scaler.unscale(*job.optimizer), UsageError);
    scaler.step(*job.optimizer);
    EXPECT_THROW(scaler.step(*job.optimizer), UsageError);
    scaler.update();
    Job other(
        world,
        torch::kFloat,
        ShardingStage1("dp"),
        {GradientSync::kReduceScatter});
    EXPECT_THROW(scaler.unscale(*other.optimizer), UsageError);
  });
}

} // namespace
} // namespace tessera
