// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/update_rule.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

TEST(UpdateRule, NamesTheStatesThatTheOptionsAskFor) {
  const auto names = [](UpdateRule rule, const ParamOptions& options) {
    std::vector<std::string> result;
    for (const StateField& field : state_fields(rule, options)) {
      result.emplace_back(field.name);
    }
    return result;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(
      names(UpdateRule::kAdamW, torch::optim::AdamWOptions().amsgrad(true)),
      ElementsAre("exp_avg", "exp_avg_sq", "max_exp_avg_sq"));
  EXPECT_THAT(
      names(UpdateRule::kSgd, torch::optim::SGDOptions(1)), ElementsAre());
  EXPECT_THAT(
      names(
          UpdateRule::kRmsprop, torch::optim::RMSpropOptions().centered(true)),
      ElementsAre("square_avg", "grad_avg"));
  EXPECT_THAT(names(UpdateRule::kLion, LionOptions()), ElementsAre("exp_avg"));
}

TEST(UpdateRule, KnowsAnAdagradThatHasNotStepped) {
  at::Tensor param = torch::ones({3}).set_requires_grad(true);
  torch::optim::Adagrad adagrad({param}, torch::optim::AdagradOptions(0.1));
  EXPECT_FALSE(has_stepped(adagrad));
  param.mutable_grad() = torch::ones({3});
  adagrad.step();
  EXPECT_TRUE(has_stepped(adagrad));
}

} // namespace
} // namespace tessera
