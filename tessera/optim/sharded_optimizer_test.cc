// SPDX-License-Identifier: Apache-2.0
// Training: every mode, rule, mesh and world size gives what one rank gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/dtensor/build.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <iostream>
#include <tuple>

namespace tessera {
namespace {

using testing::Model;
using testing::Rule;
using testing::Tensors;
using testing::Training;

constexpr double kTolerance = 1e-5;
constexpr GradientSync kModes[] = {
    GradientSync::kImplicit,
    GradientSync::kAllReduce,
    GradientSync::kReduceScatter,
    GradientSync::kBucketed};

at::Tensor random_batch(int64_t rows, int64_t columns) {
  torch::manual_seed(7);
  return torch::rand({rows, columns});
}

std::vector<Placements> all_params(
    const Model& model, const Placements& placements) {
  return std::vector<Placements>(model.values.size(), placements);
}

// Compares with one rank, on every rank, and prints the largest difference.
void expect_like_one_rank(
    const World& world,
    const Tensors& sharded,
    const Tensors& plain,
    const std::string& what) {
  const double difference = testing::largest_difference(sharded, plain);
  EXPECT_LT(difference, kTolerance) << what;
  if (world.rank() == 0) {
    std::cout << what << ": largest relative difference " << difference << "\n";
  }
}

class EveryMode
    : public ::testing::TestWithParam<std::tuple<int64_t, GradientSync, bool>> {
 protected:
  int64_t ranks() const {
    return std::get<0>(GetParam());
  }
  Training training(Rule rule = Rule::kAdamW) const {
    Training training{rule, std::get<1>(GetParam()), std::nullopt};
    if (std::get<2>(GetParam())) {
      training.clip = 1.0;
    }
    return training;
  }
  std::string what() const {
    return std::to_string(ranks()) + " ranks " +
        testing::name_of(std::get<1>(GetParam())) +
        (std::get<2>(GetParam()) ? " clip" : "");
  }
};

// The original's first row.
TEST_P(EveryMode, LinearOverDataParallelRanksTrainsLikeOne) {
  const Model model = testing::linear();
  const at::Tensor batch = random_batch(10, 10);
  const Tensors plain = testing::train_plain(model, batch, training());
  run_ranks(ranks(), [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    const auto placements = all_params(model, {Replicate()});
    const Tensors sharded = testing::train_sharded(
        model, batch, mesh, placements, {Shard(0)}, "dp", training());
    expect_like_one_rank(world, sharded, plain, "linear " + what());
  });
}

// Its second: mesh [[0, 1]] named (pp, dp).
TEST_P(EveryMode, LinearOnAMeshWithAnAxisOfOneRankTrainsLikeOne) {
  const Model model = testing::linear();
  const at::Tensor batch = random_batch(10, 10);
  const Tensors plain = testing::train_plain(model, batch, training());
  run_ranks(ranks(), [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"pp", 1}, {"dp", world.size()}});
    const auto placements = all_params(model, {Replicate(), Replicate()});
    const Tensors sharded = testing::train_sharded(
        model,
        batch,
        mesh,
        placements,
        {Replicate(), Shard(0)},
        "dp",
        training());
    expect_like_one_rank(world, sharded, plain, "(pp, dp) " + what());
  });
}

TEST_P(EveryMode, UnevenShapesAndScalarsTrainLikeOne) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = random_batch(11, 10);
  for (const Rule rule :
       {Rule::kAdamW,
        Rule::kAdam,
        Rule::kSgd,
        Rule::kSgdMomentum,
        Rule::kNesterov,
        Rule::kRmsprop,
        Rule::kAdagrad,
        Rule::kLion}) {
    const Tensors plain = testing::train_plain(model, batch, training(rule));
    run_ranks(ranks(), [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      const auto placements = all_params(model, {Replicate()});
      const Tensors sharded = testing::train_sharded(
          model, batch, mesh, placements, {Shard(0)}, "dp", training(rule));
      expect_like_one_rank(
          world,
          sharded,
          plain,
          "uneven " + testing::name_of(rule) + " " + what());
    });
  }
}

TEST_P(EveryMode, AccumulatedGradientsTrainLikeOne) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = random_batch(11, 10);
  Training training = this->training();
  training.passes = 2;
  const Tensors plain = testing::train_plain(model, batch, training);
  run_ranks(ranks(), [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    const auto placements = all_params(model, {Replicate()});
    const Tensors sharded = testing::train_sharded(
        model, batch, mesh, placements, {Shard(0)}, "dp", training);
    expect_like_one_rank(world, sharded, plain, "accumulated " + what());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds,
    EveryMode,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4),
        ::testing::ValuesIn(kModes),
        ::testing::Bool()),
    [](const auto& test) {
      return std::to_string(std::get<0>(test.param)) +
          testing::name_of(std::get<1>(test.param)) +
          (std::get<2>(test.param) ? "Clip" : "");
    });

// The original's 2x2 row. Its Linear stores [in, out]; torch's [out, in], so
// both splits of the weight are tried, and both batch layouts.
TEST(ShardedOptimizer, TrainsLikeOneOnATwoByTwoMesh) {
  const Model model = testing::linear();
  const at::Tensor batch = random_batch(10, 10);
  for (const std::optional<double> clip :
       {std::optional<double>(), std::optional<double>(1.0)}) {
    for (const GradientSync sync : kModes) {
      const Training training{Rule::kAdamW, sync, clip};
      const Tensors plain = testing::train_plain(model, batch, training);
      for (const int64_t split : {0, 1}) {
        run_ranks(4, [&](World world) {
          const DeviceMesh mesh = make_mesh(world, {{"x", 2}, {"y", 2}});
          const std::vector<Placements> placements = {
              {Replicate(), Shard(split)}, {Replicate(), Shard(0)}};
          const Tensors sharded = testing::train_sharded(
              model,
              batch,
              mesh,
              placements,
              {Shard(0), Replicate()},
              "x",
              training);
          const std::string what = "2x2 split " + std::to_string(split) + " " +
              testing::name_of(sync) + (clip ? " clip" : "");
          expect_like_one_rank(world, sharded, plain, what);
        });
      }
    }
  }
}

TEST(ShardedOptimizer, TrainsLikeOneOverBothAxesOfAMesh) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = random_batch(11, 10);
  for (const GradientSync sync : kModes) {
    const Training training{Rule::kAdamW, sync, 1.0};
    const Tensors plain = testing::train_plain(model, batch, training);
    for (const char* axis : {"x", "y"}) {
      run_ranks(4, [&](World world) {
        const DeviceMesh mesh = make_mesh(world, {{"x", 2}, {"y", 2}});
        const auto placements = all_params(model, {Replicate(), Replicate()});
        const Tensors sharded = testing::train_sharded(
            model,
            batch,
            mesh,
            placements,
            {Shard(0), Shard(0)},
            axis,
            training);
        expect_like_one_rank(
            world,
            sharded,
            plain,
            std::string("both axes, states on ") + axis + " " +
                testing::name_of(sync));
      });
    }
  }
}

// There the cost model turns a reduce_scatter into an all_reduce and a cut.
TEST(ShardedOptimizer, TrainsLikeOneOverGloo) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = random_batch(11, 10);
  for (const int64_t ranks : {2, 3}) {
    for (const GradientSync sync : kModes) {
      const Training training{Rule::kAdamW, sync, 1.0};
      const Tensors plain = testing::train_plain(model, batch, training);
      const auto train = [&](World world) {
        const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
        const auto placements = all_params(model, {Replicate()});
        const Tensors sharded = testing::train_sharded(
            model, batch, mesh, placements, {Shard(0)}, "dp", training);
        expect_like_one_rank(
            world,
            sharded,
            plain,
            "gloo, " + std::to_string(ranks) + " ranks " +
                testing::name_of(sync));
      };
      run_ranks(ranks, train, {.backend = "gloo"});
    }
  }
}

TEST(ShardedOptimizer, StepsABuiltModule) {
  const at::Tensor batch = random_batch(8, 6);
  for (const GradientSync sync : kModes) {
    run_ranks(3, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      const auto make = [] {
        return torch::nn::Sequential(
            torch::nn::Linear(6, 5),
            torch::nn::ReLU(),
            torch::nn::Linear(5, 3));
      };
      auto model = build(mesh, make);
      auto reference = make();
      for (size_t i = 0; i < reference->parameters().size(); ++i) {
        reference->parameters()[i].set_data(
            full_tensor(model->parameters()[i]).detach().clone());
      }
      auto optimizer = shard_optimizer(
          torch::optim::AdamW(model->parameters(), 1e-2),
          ShardingStage1("dp"),
          {sync});
      torch::optim::AdamW plain(reference->parameters(), 1e-2);
      const at::Tensor x = distribute(batch, mesh, {Shard(0)});
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        plain.zero_grad();
        model->forward(x).square().mean().backward();
        reference->forward(batch).square().mean().backward();
        optimizer.step();
        plain.step();
      }
      Tensors values;
      for (const at::Tensor& param : model->parameters()) {
        values.push_back(full_tensor(param).detach());
      }
      expect_like_one_rank(
          world,
          values,
          reference->parameters(),
          "built module " + testing::name_of(sync));
    });
  }
}

TEST(ShardedOptimizer, KeepsEachGroupsOptions) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = random_batch(6, 10);
  const auto groups = [](const Tensors& p) {
    using torch::optim::AdamWOptions;
    std::vector<torch::optim::OptimizerParamGroup>
        result; // interleaved: odd and even parameters
    result.emplace_back(
        Tensors{p[0], p[2], p[4]},
        std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0.3)));
    result.emplace_back(
        Tensors{p[1], p[3], p[5]},
        std::make_unique<AdamWOptions>(
            AdamWOptions(0.005).betas({0.8, 0.9}).amsgrad(true)));
    return result;
  };
  Tensors plain;
  std::ranges::transform(
      model.values, std::back_inserter(plain), testing::leaf);
  torch::optim::AdamW reference(groups(plain));
  torch::optim::StepLR reference_schedule(reference, 2, 0.5);
  const auto train = [&](auto& optimizer,
                         auto& schedule,
                         const Tensors& params,
                         const at::Tensor& x) {
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const at::Tensor output = model.forward(params, x);
      output.backward(at::ones_like(output));
      optimizer.step();
      schedule.step();
    }
  };
  train(reference, reference_schedule, plain, batch);
  for (const GradientSync sync : kModes) {
    run_ranks(2, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      Tensors params;
      for (const at::Tensor& value : model.values) {
        params.push_back(testing::distributed_leaf(value, mesh, {Replicate()}));
      }
      auto optimizer = shard_optimizer(
          torch::optim::AdamW(groups(params)), ShardingStage1("dp"), {sync});
      torch::optim::StepLR schedule(optimizer, 2, 0.5);
      train(optimizer, schedule, params, distribute(batch, mesh, {Shard(0)}));
      EXPECT_DOUBLE_EQ(
          optimizer.param_groups()[0].options().get_lr(),
          reference.param_groups()[0].options().get_lr());
      Tensors values;
      std::ranges::transform(
          params, std::back_inserter(values), [](const at::Tensor& p) {
            return full_tensor(p).detach();
          });
      expect_like_one_rank(
          world,
          values,
          plain,
          "two groups, scheduler, " + testing::name_of(sync));
    });
  }
}

} // namespace
} // namespace tessera
