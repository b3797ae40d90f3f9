// SPDX-License-Identifier: Apache-2.0
// Clipping by norm and by value against torch's own functions on one rank, with
// SGD, to which the size of a gradient matters.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

using testing::Model;
using testing::Rule;
using testing::Tensors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr GradientSync kModes[] = {
    GradientSync::kImplicit,
    GradientSync::kAllReduce,
    GradientSync::kReduceScatter,
    GradientSync::kBucketed};

at::Tensor batch() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return torch::rand({12, 10}, generator);
}

// Two groups: the first two parameters, and the others.
Tensors head(const Tensors& params) {
  return {params.begin(), params.begin() + 2};
}
Tensors tail(const Tensors& params) {
  return {params.begin() + 2, params.end()};
}

torch::optim::SGD two_groups(const Tensors& params) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(head(params));
  groups.emplace_back(tail(params));
  return torch::optim::SGD(groups, torch::optim::SGDOptions(0.01));
}

struct Sharded {
  Sharded(
      const World& world,
      GradientSync sync,
      const std::vector<Axis>& axes = {},
      const std::vector<Placements>& placements = {},
      int stage = 1)
      : mesh(make_mesh(
            world,
            axes.empty() ? std::vector<Axis>{{"dp", world.size()}} : axes)) {
    for (size_t i = 0; i < model.values.size(); ++i) {
      params.push_back(testing::distributed_leaf(
          model.values[i],
          mesh,
          placements.empty() ? replicated(mesh) : placements[i]));
    }
    optimizer.emplace(shard_optimizer(
        two_groups(params),
        ShardingStage{"dp", stage},
        {.sync = sync, .bucket_bytes = 300}));
  }
  void backward() {
    Placements cut = replicated(mesh);
    cut[0] = Shard(0);
    model.forward(params, distribute(batch(), mesh, cut)).sum().backward();
  }
  void expect_like(const Tensors& plain) const {
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_LT(
          testing::largest_difference(
              {full_tensor(params[i]).detach()}, {plain[i]}),
          2e-6)
          << "parameter " << i;
    }
  }

  Model model = testing::uneven_mlp();
  DeviceMesh mesh;
  Tensors params;
  std::optional<ShardedOptimizer> optimizer;
};

struct Plain {
  Plain() {
    std::ranges::transform(
        model.values, std::back_inserter(params), testing::leaf);
  }
  void backward() {
    model.forward(params, batch()).sum().backward();
  }
  void step() {
    two_groups(params).step();
  }

  Model model = testing::uneven_mlp();
  Tensors params;
};

class Clipping : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Clipping, ::testing::Values(1, 2, 3, 4));

TEST_P(Clipping, NormsOfAnyPowerAndOfOneGroupAreTorchs) {
  for (const double norm_type : {0.7, 1.0, 2.0, 3.5, kInfinity}) {
    Plain plain;
    plain.backward();
    const auto clip = [&](const Tensors& params, double max_norm) {
      return torch::nn::utils::clip_grad_norm_(params, max_norm, norm_type);
    };
    const double all = clip(plain.params, 4.0);
    const double first = clip(head(plain.params), 0.5);
    const double second = clip(tail(plain.params), 0.25);
    const double after = clip(plain.params, 0.3);
    plain.step();
    run_ranks(GetParam(), [&](World world) {
      for (const GradientSync sync : kModes) {
        Sharded job(world, sync);
        job.backward();
        const auto close = [](double got, double expected) {
          EXPECT_NEAR(got, expected, 2e-5 * expected);
        };
        auto& optimizer = *job.optimizer;
        close(optimizer.clip_grad_norm(4.0, norm_type), all);
        close(optimizer.clip_grad_norm(0.5, norm_type, {.group = 0}), first);
        close(optimizer.clip_grad_norm(0.25, norm_type, {.group = 1}), second);
        close(optimizer.clip_grad_norm(0.3, norm_type), after);
        optimizer.step();
        job.expect_like(plain.params);
      }
    });
  }
}

TEST_P(Clipping, ValuesAndNormsFollowOneAnotherInAnyOrder) {
  using torch::nn::utils::clip_grad_norm_;
  using torch::nn::utils::clip_grad_value_;
  Plain plain;
  plain.backward();
  clip_grad_value_(plain.params, 1.5);
  const double norm = clip_grad_norm_(plain.params, 2.0);
  clip_grad_value_(head(plain.params), 0.05);
  const double second = clip_grad_norm_(plain.params, 1.0, 1.0);
  plain.step();
  run_ranks(GetParam(), [&](World world) {
    for (const GradientSync sync : kModes) {
      for (const int stage : {1, 2}) {
        if (stage == 2 && sync != GradientSync::kBucketed) {
          continue;
        }
        Sharded job(world, sync, {}, {}, stage);
        job.backward();
        job.optimizer->clip_grad_value(1.5);
        EXPECT_NEAR(job.optimizer->clip_grad_norm(2.0), norm, 2e-5 * norm);
        job.optimizer->clip_grad_value(0.05, 0);
        EXPECT_NEAR(
            job.optimizer->clip_grad_norm(1.0, 1.0), second, 2e-5 * second);
        job.optimizer->step();
        job.expect_like(plain.params);
      }
    }
  });
}

// Each clip belongs to the gradients of its step.
TEST_P(Clipping, LaterStepsAreNotClippedByEarlierOnes) {
  Plain plain;
  for (int step = 0; step < 4; ++step) {
    for (at::Tensor& param : plain.params) {
      param.mutable_grad().reset();
    }
    plain.backward();
    if (step % 2 == 0) {
      torch::nn::utils::clip_grad_value_(plain.params, 0.1);
    }
    if (step == 1) {
      torch::nn::utils::clip_grad_norm_(plain.params, 0.5);
    }
    plain.step();
  }
  run_ranks(GetParam(), [&](World world) {
    Sharded job(world, GradientSync::kBucketed);
    for (int step = 0; step < 4; ++step) {
      job.optimizer->zero_grad();
      job.backward();
      if (step % 2 == 0) {
        job.optimizer->clip_grad_value(0.1);
      }
      if (step == 1) {
        job.optimizer->clip_grad_norm(0.5);
      }
      job.optimizer->step();
    }
    job.expect_like(plain.params);
  });
}

TEST_P(Clipping, NeedsOneSmallAllReduce) {
  run_ranks(GetParam(), [&](World world) {
    Sharded job(world, GradientSync::kBucketed);
    for (int step = 0; step < 2; ++step) {
      job.optimizer->zero_grad();
      job.backward();
      world.record().reset();
      job.optimizer->clip_grad_norm(2.0, 2.0, {.error_if_nonfinite = true});
      job.optimizer->clip_grad_norm(1.0, 2.0, {.group = 1});
      job.optimizer->clip_grad_value(0.5);
      job.optimizer->step();
    }
    const int64_t moving = world.size() > 1 ? 1 : 0;
    EXPECT_EQ(world.record().count(CollectiveKind::kAllReduce), moving);
    EXPECT_EQ(
        world.record().bytes(CollectiveKind::kAllReduce),
        moving * 8 * (2 + 6 + 1)); // groups, parameters, whether all is new
  });
}

// Replicated and sharded parameters, a tied one, and a second mesh.
TEST(ClippingMeshes, EveryElementCountsOnce) {
  const at::Tensor extra = torch::arange(6.F) / 3;
  const auto forward = [](const Tensors& p, const at::Tensor& x) {
    // The first weight is used twice.
    return (torch::linear(x, p[0]).matmul(p[0]) + torch::linear(x, p[1])).sum();
  };
  const at::Tensor first = testing::uneven_mlp().values[0]; // [13, 10]
  const at::Tensor second = torch::eye(10);
  for (const double norm_type : {1.5, 2.0, kInfinity}) {
    Tensors plain{
        testing::leaf(first), testing::leaf(second), testing::leaf(extra)};
    (forward(plain, batch()) + plain[2].square().sum()).backward();
    const double norm =
        torch::nn::utils::clip_grad_norm_(plain, 1.0, norm_type);
    torch::nn::utils::clip_grad_value_(plain, 0.03);
    torch::optim::SGD(plain, 0.1).step();
    for (const int64_t tensor_parallel : {1, 2}) {
      run_ranks(4, [&](World world) {
        const DeviceMesh mesh = make_mesh(
            world, {{"dp", 4 / tensor_parallel}, {"tp", tensor_parallel}});
        const DeviceMesh flat = make_mesh(world, {{"dp", 4}});
        Tensors params{
            testing::distributed_leaf(first, mesh, {Replicate(), Shard(0)}),
            testing::distributed_leaf(second, mesh, {Replicate(), Replicate()}),
            testing::distributed_leaf(extra, flat, {Replicate()})};
        auto optimizer = shard_optimizer(
            torch::optim::SGD(
                {params[0], params[1], params[2], params[0]}, 0.1),
            ShardingStage1("dp"),
            {.bucket_bytes = 100});
        forward(params, distribute(batch(), mesh, {Shard(0), Replicate()}))
            .backward();
        params[2].square().sum().backward();
        EXPECT_NEAR(
            optimizer.clip_grad_norm(1.0, norm_type), norm, 2e-5 * norm);
        optimizer.clip_grad_value(0.03);
        optimizer.step();
        for (size_t i = 0; i < params.size(); ++i) {
          EXPECT_LT(
              testing::largest_difference(
                  {full_tensor(params[i]).detach()}, {plain[i]}),
              2e-6)
              << "parameter " << i;
        }
      });
    }
  }
}

struct Holder : torch::nn::Module {
  explicit Holder(const Tensors& params) {
    for (size_t i = 0; i < params.size(); ++i) {
      register_parameter(fmt::format("p{}", i), params[i]);
    }
  }
};

std::string error_of(
    ShardedOptimizer& optimizer, double norm_type, const ClipOptions& options) {
  try {
    optimizer.clip_grad_norm(1.0, norm_type, options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST_P(Clipping, NamesTheGradientsThatAreNotFiniteOnEveryRank) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  using ::testing::Not;
  run_ranks(GetParam(), [](World world) {
    for (const GradientSync sync : kModes) {
      for (const double norm_type : {2.0, kInfinity}) {
        Sharded job(world, sync);
        job.backward();
        if (world.rank() == world.size() - 1) {
          local_of(job.params[2].grad())[1][2].fill_(kInfinity);
          local_of(job.params[1].grad())[0].fill_(std::nan(""));
        }
        ClipOptions options{.error_if_nonfinite = true};
        EXPECT_THAT(
            error_of(*job.optimizer, norm_type, options),
            AllOf(
                HasSubstr("parameter 1 of group 0"),
                HasSubstr("parameter 0 of group 1"),
                Not(HasSubstr("parameter 1 of group 1"))));
        job.optimizer->name_parameters(Holder(job.params));
        EXPECT_THAT(
            error_of(*job.optimizer, norm_type, options),
            HasSubstr("the gradients of p1, p2;"));
        options.group = 1;
        EXPECT_THAT(
            error_of(*job.optimizer, norm_type, options),
            HasSubstr("the gradients of p2;"));
      }
    }
  });
}

TEST(ClippingErrors, SayWhatIsWrong) {
  run_ranks(1, [](World world) {
    Sharded job(world, GradientSync::kBucketed);
    job.backward();
    EXPECT_THROW(job.optimizer->clip_grad_value(-1), UsageError);
    EXPECT_THROW(job.optimizer->clip_grad_value(1, 2), UsageError);
    EXPECT_THROW(job.optimizer->clip_grad_norm(1, 0), UsageError);
    EXPECT_THROW(job.optimizer->clip_grad_norm(1, 2, {.group = 2}), UsageError);
    // Finite elements whose squares are not.
    local_of(job.params[2].grad()).fill_(3e30F);
    EXPECT_THAT(
        error_of(*job.optimizer, 2.0, {.error_if_nonfinite = true}),
        ::testing::HasSubstr("all elements are finite"));
  });
}

} // namespace
} // namespace tessera
