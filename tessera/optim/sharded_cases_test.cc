// SPDX-License-Identifier: Apache-2.0
// Reports against other systems, and what a sharded optimizer must take without
// stumbling. The right value is what one device gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/dtensor/build.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <cmath>

namespace tessera {
namespace {

using testing::Rule;
using testing::Tensors;

constexpr GradientSync kModes[] = {
    GradientSync::kImplicit,
    GradientSync::kAllReduce,
    GradientSync::kReduceScatter};

DeviceMesh data_parallel(const World& world) {
  return make_mesh(world, {{"dp", world.size()}});
}

// A replicated parameter whose gradient is what the ranks' local tensors reduce
// to.
at::Tensor with_gradient(
    const DeviceMesh& mesh,
    const at::Tensor& local,
    ReduceOp op = ReduceOp::kSum) {
  at::Tensor param =
      testing::distributed_leaf(at::ones_like(local), mesh, {Replicate()});
  param.mutable_grad() = wrap_local(
      local,
      intern_contiguous(mesh, {Partial(op)}, local.sizes(), c10::kFloat));
  return param;
}

ShardedOptimizer sgd(Tensors params, GradientSync sync, double lr = 1) {
  return shard_optimizer(
      torch::optim::SGD(std::move(params), lr), ShardingStage1("dp"), {sync});
}

// llm.c 524: the norm counted shards that the rank does not own.
TEST(ShardedCases, NormOfAveragedGradientsCountsEachElementOnce) {
  for (const GradientSync sync : kModes) {
    run_ranks(2, [sync](World world) {
      const at::Tensor local = world.rank() == 0
          ? torch::tensor({1.F, 2.F, 3.F, 4.F})
          : torch::tensor({3.F, 2.F, 1.F, 0.F});
      at::Tensor param =
          with_gradient(data_parallel(world), local, ReduceOp::kAvg);
      auto optimizer = sgd({param}, sync);
      EXPECT_NEAR(optimizer.clip_grad_norm(2.0), 4, 1e-6)
          << testing::name_of(sync);
      optimizer.step();
      EXPECT_TRUE(full_tensor(param).allclose(torch::zeros(4), 0, 1e-5))
          << testing::name_of(sync); // 1 - 2 * 2 / 4
    });
  }
}

// pytorch 180346: gradients on two meshes, of norms 6 and 8.
TEST(ShardedCases, NormSpansSeveralMeshes) {
  for (const int64_t ranks : {1, 2, 4}) {
    for (const GradientSync sync : kModes) {
      run_ranks(ranks, [sync](World world) {
        const DeviceMesh flat = data_parallel(world);
        const DeviceMesh square =
            make_mesh(world, {{"tp", world.size() > 2 ? 2 : 1}, {"dp", -1}});
        at::Tensor six = testing::distributed_leaf(
            torch::zeros({2, 2}), flat, {Replicate()});
        at::Tensor eight = testing::distributed_leaf(
            torch::zeros({4, 4}), square, {Replicate(), Replicate()});
        six.mutable_grad() =
            distribute(torch::full({2, 2}, 3.0), flat, {Partial()});
        eight.mutable_grad() = distribute(
            torch::full({4, 4}, 2.0), square, {Replicate(), Partial()});
        auto optimizer = sgd({six, eight}, sync);
        EXPECT_NEAR(optimizer.clip_grad_norm(5.0), 10, 1e-5)
            << testing::name_of(sync);
        optimizer.step();
        EXPECT_TRUE(full_tensor(six).allclose(torch::full({2, 2}, -1.5), 1e-5))
            << testing::name_of(sync);
        EXPECT_TRUE(
            full_tensor(eight).allclose(torch::full({4, 4}, -1.0), 1e-5))
            << testing::name_of(sync);
      });
    }
  }
}

// pytorch 176076: the last rank's rows of a tied weight were frozen. Listed
// twice, updated once.
TEST(ShardedCases, TiedEmbeddingChangesEveryRowOnce) {
  const at::Tensor value = torch::arange(20.F).view({5, 4}) / 20;
  const at::Tensor ids = torch::tensor({0, 1, 2, 3, 4, 0}, torch::kLong);
  const auto loss = [](const at::Tensor& weight, const at::Tensor& input) {
    const at::Tensor logits =
        torch::matmul(torch::embedding(weight, input), weight.t());
    return torch::nn::functional::cross_entropy(logits, input);
  };
  at::Tensor plain = testing::leaf(value);
  torch::optim::SGD reference({plain}, 0.5);
  loss(plain, ids).backward();
  reference.step();
  for (const GradientSync sync : kModes) {
    run_ranks(3, [&](World world) {
      const DeviceMesh mesh = data_parallel(world);
      at::Tensor weight = testing::distributed_leaf(value, mesh, {Replicate()});
      auto optimizer = sgd({weight, weight}, sync, 0.5);
      loss(weight, distribute(ids, mesh, {Shard(0)})).backward();
      optimizer.step();
      const at::Tensor after = full_tensor(weight).detach();
      EXPECT_TRUE(after.allclose(plain, 1e-5, 1e-6)) << testing::name_of(sync);
      EXPECT_TRUE((after != value).any(1).all().item<bool>())
          << testing::name_of(sync);
    });
  }
}

// deepspeed 966: a tied Linear trained differently from stage to stage.
TEST(ShardedCases, TiedLinearTrainsAsWithoutSharding) {
  torch::manual_seed(3);
  const testing::Model model = {
      {torch::rand({5, 5}) - 0.5, torch::rand({5})},
      [](const Tensors& p, const at::Tensor& x) {
        return torch::linear(
            torch::relu(torch::linear(x, p[0], p[1])), p[0].t(), p[1]);
      }};
  const at::Tensor batch = torch::rand({7, 5});
  for (const GradientSync sync : kModes) {
    const testing::Training training{Rule::kAdamW, sync, 1.0};
    const Tensors plain = testing::train_plain(model, batch, training);
    run_ranks(3, [&](World world) {
      const std::vector<Placements> placements(2, {Replicate()});
      const Tensors sharded = testing::train_sharded(
          model,
          batch,
          data_parallel(world),
          placements,
          {Shard(0)},
          "dp",
          training);
      EXPECT_LT(testing::largest_difference(sharded, plain), 1e-5)
          << testing::name_of(sync);
    });
  }
}

// pytorch 69031: accumulation with a parameter that some passes do not use; w =
// 1, x = 1 and 2.
TEST(ShardedCases, AccumulationWithAParameterUnusedInSomePasses) {
  for (const GradientSync sync : kModes) {
    run_ranks(2, [sync](World world) {
      const DeviceMesh mesh = data_parallel(world);
      at::Tensor used_once =
          testing::distributed_leaf(torch::ones({1}), mesh, {Replicate()});
      at::Tensor used_always =
          testing::distributed_leaf(torch::ones({1}), mesh, {Replicate()});
      const at::Tensor x = from_local(
          torch::full({1}, static_cast<float>(world.rank() + 1)),
          mesh,
          {Shard(0)});
      auto optimizer = sgd({used_once, used_always}, sync);
      (used_once * used_always * x).mean().backward();
      (used_always * x).mean().backward();
      EXPECT_NEAR(full_tensor(used_once.grad()).item<float>(), 1.5, 1e-6);
      optimizer.step();
      EXPECT_NEAR(full_tensor(used_once).item<float>(), -0.5, 1e-6)
          << testing::name_of(sync);
      EXPECT_NEAR(full_tensor(used_always).item<float>(), -2, 1e-6)
          << testing::name_of(sync);
    });
  }
}

// paddle 67756: Embedding [1001, 1024] over 2 ranks failed to gather.
TEST(ShardedCases, EmbeddingOfAnOddNumberOfRowsIsExact) {
  const at::Tensor value = torch::arange(1001 * 1024)
                               .remainder(97)
                               .to(torch::kFloat)
                               .view({1001, 1024});
  for (const GradientSync sync : kModes) {
    run_ranks(2, [&](World world) {
      const DeviceMesh mesh = data_parallel(world);
      at::Tensor weight = testing::distributed_leaf(value, mesh, {Replicate()});
      weight.mutable_grad() = wrap_local(
          value.clone(),
          intern_contiguous(mesh, {Partial()}, value.sizes(), c10::kFloat));
      auto optimizer = shard_optimizer(
          torch::optim::SGD(
              {weight}, torch::optim::SGDOptions(0.25).momentum(0.5)),
          ShardingStage1("dp"),
          {sync});
      optimizer.step();
      const auto& state = static_cast<torch::optim::SGDParamState&>(
          *optimizer.state().at(weight.unsafeGetTensorImpl()));
      EXPECT_EQ(
          local_of(state.momentum_buffer()).size(0),
          world.rank() == 0 ? 501 : 500);
      EXPECT_TRUE(full_tensor(weight).equal(value - 0.25 * (2 * value)))
          << testing::name_of(sync);
    });
  }
}

// pytorch 19540: training with replicas in C++, whose accuracy never moved.
TEST(ShardedCases, ClassifierOverReplicasLearns) {
  torch::manual_seed(5);
  const at::Tensor labels = torch::arange(120).remainder(10);
  const at::Tensor images = torch::nn::functional::one_hot(labels, 10)
                                .to(torch::kFloat)
                                .repeat({1, 6}) +
      0.3 * torch::randn({120, 60});
  for (const GradientSync sync : kModes) {
    run_ranks(2, [&](World world) {
      const DeviceMesh mesh = data_parallel(world);
      auto model = build(mesh, [] {
        return torch::nn::Sequential(
            torch::nn::Linear(60, 32),
            torch::nn::ReLU(),
            torch::nn::Linear(32, 10));
      });
      auto optimizer = shard_optimizer(
          torch::optim::Adam(model->parameters(), 1e-2),
          ShardingStage1("dp"),
          {sync});
      const at::Tensor x = distribute(images, mesh, {Shard(0)});
      const at::Tensor y = distribute(labels, mesh, {Shard(0)});
      for (int step = 0; step < 40; ++step) {
        optimizer.zero_grad();
        torch::nn::functional::cross_entropy(model->forward(x), y).backward();
        optimizer.step();
      }
      const at::Tensor predicted = full_tensor(model->forward(x)).argmax(1);
      EXPECT_GT(
          (predicted == labels).to(torch::kFloat).mean().item<float>(), 0.95F)
          << testing::name_of(sync);
    });
  }
}

// The original's values for work on local tensors.
TEST(ShardedCases, MeansOfLocalPartsAddUpAsPartial) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = data_parallel(world);
    const at::Tensor x = from_local(
        torch::arange(10.F) + static_cast<float>(world.rank()),
        mesh,
        {Shard(0)});
    EXPECT_EQ(x.size(0), 20);
    const at::Tensor local = to_local(x);
    const at::Tensor mean = world.rank() == 0 ? local.slice(0, 1, 3).mean()
                                              : local.slice(0, 4, 7).mean();
    EXPECT_FLOAT_EQ(mean.item<float>(), world.rank() == 0 ? 1.5F : 6.0F);
    EXPECT_FLOAT_EQ(
        full_tensor(from_local(mean, mesh, {Partial()})).item<float>(), 7.5F);
  });
}

TEST(ShardedCases, FrozenAndUnusedParametersStayAsTheyAre) {
  for (const GradientSync sync : kModes) {
    run_ranks(2, [sync](World world) {
      const DeviceMesh mesh = data_parallel(world);
      at::Tensor frozen =
          testing::distributed_leaf(torch::ones({3}), mesh, {Replicate()})
              .set_requires_grad(false);
      at::Tensor unused =
          testing::distributed_leaf(torch::ones({3}), mesh, {Replicate()});
      at::Tensor used = with_gradient(mesh, torch::ones({3}));
      auto optimizer = shard_optimizer(
          torch::optim::AdamW({frozen, unused, used}, 0.1),
          ShardingStage1("dp"),
          {sync});
      EXPECT_NEAR(optimizer.clip_grad_norm(1.0), 2 * std::sqrt(3.0), 1e-6);
      optimizer.step();
      EXPECT_TRUE(full_tensor(frozen).equal(torch::ones({3})));
      EXPECT_TRUE(full_tensor(unused).equal(torch::ones({3})))
          << "weight decay without a gradient";
      EXPECT_FALSE(full_tensor(used).equal(torch::ones({3})));
      EXPECT_EQ(optimizer.state().size(), 1U);
    });
  }
}

TEST(ShardedCases, GradientThatComesLaterStartsItsOwnMomentum) {
  const testing::Model model = {
      {torch::full({3}, 2.0), torch::full({5}, 3.0)}, {}};
  const auto train = [](auto& optimizer, const Tensors& p, auto&& ones) {
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      at::Tensor loss = (p[0].square() * ones(3)).sum();
      if (step >= 2) {
        loss = loss + (p[1].square() * ones(5)).sum();
      }
      loss.backward();
      optimizer.step();
    }
  };
  Tensors plain = {
      testing::leaf(model.values[0]), testing::leaf(model.values[1])};
  const auto reference = testing::plain_optimizer(Rule::kSgdMomentum, plain);
  train(*reference, plain, [](int64_t n) { return torch::ones({n}); });
  for (const GradientSync sync : kModes) {
    run_ranks(2, [&](World world) {
      const DeviceMesh mesh = data_parallel(world);
      Tensors params;
      for (const at::Tensor& value : model.values) {
        params.push_back(testing::distributed_leaf(value, mesh, {Replicate()}));
      }
      auto optimizer = testing::sharded_optimizer(
          Rule::kSgdMomentum, params, ShardingStage1("dp"), {sync});
      train(optimizer, params, [&](int64_t n) {
        return distribute(torch::ones({n}), mesh, {Shard(0)});
      });
      EXPECT_TRUE(full_tensor(params[0]).allclose(plain[0], 1e-5))
          << testing::name_of(sync);
      EXPECT_TRUE(full_tensor(params[1]).allclose(plain[1], 1e-5))
          << testing::name_of(sync);
    });
  }
}

TEST(ShardedCases, ClosureIsCalledWithGradientsOn) {
  run_ranks(2, [](World world) {
    at::Tensor param = testing::distributed_leaf(
        torch::ones({4}), data_parallel(world), {Replicate()});
    auto optimizer = sgd({param}, GradientSync::kReduceScatter, 0.5);
    const c10::NoGradGuard no_grad;
    const at::Tensor loss = optimizer.step([&] {
      at::Tensor value = param.square().sum();
      value.backward();
      return value;
    });
    EXPECT_FLOAT_EQ(full_tensor(loss).item<float>(), 4);
    EXPECT_TRUE(full_tensor(param).equal(torch::zeros({4})));
  });
}

TEST(ShardedCases, AddedGroupsTakePart) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = data_parallel(world);
    at::Tensor first = with_gradient(mesh, torch::ones({4}));
    at::Tensor later = with_gradient(mesh, torch::ones({3}));
    auto optimizer = sgd({first}, GradientSync::kReduceScatter, 0.5);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
    auto moved = std::move(optimizer);
    moved.step();
    EXPECT_TRUE(full_tensor(first).equal(torch::zeros({4})));
    EXPECT_TRUE(full_tensor(later).equal(torch::zeros({3})));
    moved.zero_grad();
    EXPECT_FALSE(first.grad().defined());
  });
}

} // namespace
} // namespace tessera
