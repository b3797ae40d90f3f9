// SPDX-License-Identifier: Apache-2.0
// What a user can get wrong, and what the environment chooses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <cstdlib>

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Tensors;

// Runs `fn` in a world of one with a parameter on mesh (dp=1) and returns the
// message of the UsageError that it must throw.
std::string usage_error(const std::function<void(at::Tensor param)>& fn) {
  std::string message;
  run_ranks(1, [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
    try {
      fn(testing::distributed_leaf(torch::ones({4}), mesh, {Replicate()}));
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      message = error.what();
    }
  });
  return message;
}

TEST(ShardedErrors, NameTheOptimizerAndThoseThatCanBeSharded) {
  const auto message = usage_error([](const at::Tensor& param) {
    shard_optimizer(
        torch::optim::LBFGS({param}, torch::optim::LBFGSOptions()),
        ShardingStage1("dp"));
  });
  EXPECT_EQ(
      message,
      "shard_optimizer: got torch::optim::LBFGS, whose update is not sharded "
      "yet; expected torch::optim::AdamW, Adam, SGD, RMSprop or Adagrad, or "
      "tessera::Lion; take one of those, or step this one as it is, with its "
      "whole state on every rank");
}

TEST(ShardedErrors, ListTheAxesOfTheMesh) {
  const auto message = usage_error([](const at::Tensor& param) {
    shard_optimizer(torch::optim::AdamW({param}), ShardingStage1("data"));
  });
  EXPECT_THAT(message, AllOf(HasSubstr("data"), HasSubstr("dp")));
}

TEST(ShardedErrors, PointPlainParametersToBuild) {
  const auto message = usage_error([](const at::Tensor& param) {
    const at::Tensor plain = testing::leaf(torch::ones(3));
    shard_optimizer(torch::optim::AdamW({param, plain}), ShardingStage1("dp"));
  });
  EXPECT_THAT(message, AllOf(HasSubstr("plain"), HasSubstr("build")));
}

TEST(ShardedErrors, RefuseAPlainGradient) {
  const auto message = usage_error([](at::Tensor param) {
    auto optimizer =
        shard_optimizer(torch::optim::AdamW({param}), ShardingStage1("dp"));
    param.mutable_grad() = torch::ones(4);
    optimizer.step();
  });
  EXPECT_THAT(message, HasSubstr("gradient"));
}

TEST(ShardedErrors, RefuseAnOptimizerThatHasStepped) {
  const auto message = usage_error([](at::Tensor param) {
    torch::optim::AdamW optimizer({param});
    optimizer.state()[param.unsafeGetTensorImpl()] =
        std::make_unique<torch::optim::AdamWParamState>();
    shard_optimizer(std::move(optimizer), ShardingStage1("dp"));
  });
  EXPECT_THAT(message, HasSubstr("before training"));
}

TEST(ShardedErrors, RefuseAParameterInTwoGroups) {
  const auto message = usage_error([](const at::Tensor& param) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Tensors{param});
    groups.emplace_back(Tensors{param});
    shard_optimizer(torch::optim::AdamW(groups), ShardingStage1("dp"));
  });
  EXPECT_THAT(message, HasSubstr("groups 0 and 1"));
}

TEST(ShardedErrors, RefuseANormTypeThatIsNone) {
  const auto message = usage_error([](const at::Tensor& param) {
    shard_optimizer(torch::optim::AdamW({param}), ShardingStage1("dp"))
        .clip_grad_norm(1.0, 0.0);
  });
  EXPECT_THAT(message, HasSubstr("norm_type"));
}

TEST(ShardedErrors, SavingSaysWhatToDoInstead) {
  const auto message = usage_error([](const at::Tensor& param) {
    const auto optimizer =
        shard_optimizer(torch::optim::AdamW({param}), ShardingStage1("dp"));
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
  });
  EXPECT_THAT(message, HasSubstr("state_dict"));
}

class Environment : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("FLAGS_fuse_allreduce_in_opt");
    unsetenv("FLAGS_fuse_reducescatter_in_opt");
  }
  static GradientSync chosen(const ShardOptions& options = {}) {
    GradientSync sync = GradientSync::kDefault;
    run_ranks(1, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
      at::Tensor param =
          testing::distributed_leaf(torch::ones({4}), mesh, {Replicate()});
      auto optimizer = shard_optimizer(
          torch::optim::AdamW({param}), ShardingStage1("dp"), options);
      sync = optimizer.sync();
      optimizer.step();
    });
    return sync;
  }
};

TEST_F(Environment, ChoosesWhereTheCodeDidNot) {
  EXPECT_EQ(chosen(), GradientSync::kBucketed);
  for (const char* on : {"True", "true", "1"}) {
    setenv("FLAGS_fuse_allreduce_in_opt", on, 1);
    EXPECT_EQ(chosen(), GradientSync::kAllReduce) << on;
    EXPECT_EQ(chosen({GradientSync::kImplicit}), GradientSync::kImplicit);
  }
  setenv("FLAGS_fuse_reducescatter_in_opt", "0", 1);
  EXPECT_EQ(chosen(), GradientSync::kAllReduce);
  setenv("FLAGS_fuse_allreduce_in_opt", "False", 1);
  setenv("FLAGS_fuse_reducescatter_in_opt", "1", 1);
  EXPECT_EQ(chosen(), GradientSync::kReduceScatter);
}

TEST_F(Environment, IsReadAtEachStep) {
  run_ranks(1, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
    at::Tensor param =
        testing::distributed_leaf(torch::ones({4}), mesh, {Replicate()});
    auto optimizer =
        shard_optimizer(torch::optim::AdamW({param}), ShardingStage1("dp"));
    EXPECT_EQ(optimizer.sync(), GradientSync::kBucketed);
    setenv("FLAGS_fuse_reducescatter_in_opt", "1", 1);
    EXPECT_EQ(optimizer.sync(), GradientSync::kReduceScatter);
    optimizer.step();
    setenv("FLAGS_fuse_allreduce_in_opt", "1", 1);
    EXPECT_THROW(optimizer.step(), UsageError);
    EXPECT_THROW(optimizer.clip_grad_norm(1.0), UsageError);
    unsetenv("FLAGS_fuse_reducescatter_in_opt");
    EXPECT_EQ(optimizer.sync(), GradientSync::kAllReduce);
    optimizer.step();
    unsetenv("FLAGS_fuse_allreduce_in_opt");
    EXPECT_THROW(optimizer.step(), UsageError); // states are no flat buffers
  });
}

} // namespace
} // namespace tessera
