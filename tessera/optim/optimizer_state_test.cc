// SPDX-License-Identifier: Apache-2.0
// A state that was saved anywhere goes on anywhere, as if nothing had happened.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

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

// How a run is distributed.
struct Setting {
  int64_t ranks;
  GradientSync sync;
  int stage = 1;
};

at::Tensor batch(int step) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  return torch::rand({12, 10}, generator);
}

// What a run leaves behind.
struct Saved {
  Tensors values;
  OptimizerState state;
};

// Steps from `first` up to `end`, beginning with what was saved, if anything.
Saved run(
    const Setting& setting,
    Rule rule,
    const Model& model,
    const Saved* before,
    int first,
    int end) {
  Saved result;
  run_ranks(setting.ranks, [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    Tensors params;
    for (size_t i = 0; i < model.values.size(); ++i) {
      params.push_back(testing::distributed_leaf(
          before == nullptr ? model.values[i] : before->values[i],
          mesh,
          {Replicate()}));
    }
    const Holder module(params);
    auto optimizer = testing::sharded_optimizer(
        rule,
        params,
        ShardingStage{"dp", setting.stage},
        {.sync = setting.sync, .bucket_bytes = 200});
    if (before != nullptr) {
      optimizer.load_state_dict(module, before->state);
    }
    for (int step = first; step < end; ++step) {
      optimizer.zero_grad();
      model.forward(params, distribute(batch(step), mesh, {Shard(0)}))
          .sum()
          .backward();
      optimizer.step();
    }
    const OptimizerState state = optimizer.state_dict(module);
    Tensors values;
    for (const at::Tensor& param : params) {
      values.push_back(full_tensor(param).detach().clone());
    }
    if (world.rank() == 0) {
      result = {values, state};
    }
  });
  return result;
}

const std::vector<Setting> kSettings = {
    {1, GradientSync::kBucketed},
    {4, GradientSync::kBucketed},
    {3, GradientSync::kBucketed, 2},
    {2, GradientSync::kReduceScatter},
    {3, GradientSync::kAllReduce},
    {2, GradientSync::kImplicit},
};

TEST(OptimizerState, GoesOnInAnyOtherSetting) {
  const Model model = testing::uneven_mlp();
  for (const Rule rule : {Rule::kAdamW, Rule::kSgdMomentum, Rule::kSgd}) {
    const Saved expected = run(kSettings[0], rule, model, nullptr, 0, 6);
    for (size_t i = 0; i < kSettings.size(); ++i) {
      const Setting& from = kSettings[i];
      const Setting& to = kSettings[(i + 2) % kSettings.size()];
      const Saved half = run(from, rule, model, nullptr, 0, 3);
      const Saved whole = run(to, rule, model, &half, 3, 6);
      EXPECT_LT(
          testing::largest_difference(whole.values, expected.values), 2e-6)
          << testing::name_of(rule) << " from setting " << i;
      EXPECT_EQ(whole.state.size(), expected.state.size());
      for (const auto& [name, state] : expected.state) {
        EXPECT_EQ(whole.state.at(name).steps, state.steps);
      }
    }
  }
}

TEST(OptimizerState, SavedAndLoadedInTheSameSettingIsBitEqual) {
  const Model model = testing::uneven_mlp();
  for (const Setting& setting : kSettings) {
    const Saved expected = run(setting, Rule::kAdamW, model, nullptr, 0, 6);
    const Saved half = run(setting, Rule::kAdamW, model, nullptr, 0, 3);
    const Saved whole = run(setting, Rule::kAdamW, model, &half, 3, 6);
    for (size_t i = 0; i < expected.values.size(); ++i) {
      EXPECT_TRUE(whole.values[i].equal(expected.values[i]));
    }
    for (const auto& [name, state] : expected.state) {
      for (const auto& [field, tensor] : state.tensors) {
        EXPECT_TRUE(whole.state.at(name).tensors.at(field).equal(tensor))
            << name << " " << field;
      }
    }
  }
}

TEST(OptimizerState, AskingChangesNothingAndAnEmptyOneIsFine) {
  const Model model = testing::linear();
  for (const Setting& setting : kSettings) {
    run_ranks(setting.ranks, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
      Tensors params;
      for (const at::Tensor& value : model.values) {
        params.push_back(testing::distributed_leaf(value, mesh, {Replicate()}));
      }
      const Holder module(params);
      auto optimizer = testing::sharded_optimizer(
          Rule::kAdamW,
          params,
          ShardingStage{"dp", setting.stage},
          {.sync = setting.sync});
      EXPECT_TRUE(optimizer.state_dict(module).empty());
      optimizer.load_state_dict(module, {});
      EXPECT_TRUE(full_tensor(params[0]).equal(model.values[0]));
      // What was loaded is there before the first step, too.
      const OptimizerState state{
          {"p1",
           {4,
            {{"exp_avg", torch::ones({10})},
             {"exp_avg_sq", torch::full({10}, 2.0)}}}}};
      optimizer.load_state_dict(module, state);
      const OptimizerState back = optimizer.state_dict(module);
      EXPECT_EQ(back.size(), 1);
      EXPECT_EQ(back.at("p1").steps, 4);
      EXPECT_TRUE(
          back.at("p1").tensors.at("exp_avg_sq").equal(torch::full({10}, 2.0)));
    });
  }
}

TEST(OptimizerState, WhatDoesNotFitIsRefused) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    const Tensors params{
        testing::distributed_leaf(torch::ones({4}), mesh, {Replicate()})};
    const Holder module(params);
    auto optimizer = testing::sharded_optimizer(
        Rule::kAdamW, params, ShardingStage1("dp"), {});
    const auto message = [&](const OptimizerState& state) {
      try {
        optimizer.load_state_dict(module, state);
      } catch (const UsageError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    using ::testing::HasSubstr;
    const at::Tensor four = torch::ones({4});
    EXPECT_THAT(message({{"q", {}}}), HasSubstr("the state of q"));
    EXPECT_THAT(
        message({{"p0", {1, {{"exp_avg", four}}}}}),
        HasSubstr("expected [exp_avg, exp_avg_sq]"));
    EXPECT_THAT(
        message(
            {{"p0",
              {1, {{"exp_avg", four}, {"exp_avg_sq", torch::ones({2, 2})}}}}}),
        HasSubstr("sizes [2, 2], expected the parameter's [4]"));
    EXPECT_THROW(optimizer.state_dict(Holder({})), UsageError);
  });
}

} // namespace
} // namespace tessera
