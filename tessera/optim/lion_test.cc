// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/optim/lion.h>
#include <torch/torch.h>

#include <sstream>
#include <tuple>

namespace tessera {
namespace {

TEST(Lion, StepsByTheSignOfTheInterpolatedAverage) {
  at::Tensor param = torch::tensor({1.0, 1.0, 1.0}).set_requires_grad(true);
  Lion lion({param}, LionOptions(0.1).betas({0.5, 0.75}).weight_decay(0.5));
  param.mutable_grad() = torch::tensor({4.0, -4.0, 0.0});
  lion.step();
  EXPECT_TRUE(param.allclose(torch::tensor({0.85, 1.05, 0.95})));
  // The average is now (1, -1, 0): a smaller opposite gradient does not turn
  // the direction, a larger one does.
  param.mutable_grad() = torch::tensor({-0.5, 2.0, 0.0});
  lion.step();
  EXPECT_TRUE(param.allclose(
      torch::tensor({0.85 * 0.95 - 0.1, 1.05 * 0.95 - 0.1, 0.95 * 0.95})));
}

TEST(Lion, IsSavedAndLoaded) {
  at::Tensor param = torch::ones({3}).set_requires_grad(true);
  Lion lion({param}, LionOptions(0.1).betas({0.5, 0.75}));
  param.mutable_grad() = torch::ones({3});
  lion.step();
  std::stringstream stream;
  torch::save(lion, stream);
  Lion loaded({param}, LionOptions());
  torch::load(loaded, stream);
  const auto average = [&](Lion& optimizer) {
    return static_cast<LionParamState&>(
               *optimizer.state().at(param.unsafeGetTensorImpl()))
        .exp_avg();
  };
  EXPECT_TRUE(average(loaded).equal(average(lion)));
  const auto& options =
      static_cast<const LionOptions&>(loaded.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.1);
  EXPECT_EQ(options.betas(), std::make_tuple(0.5, 0.75));
}

TEST(Lion, RefusesOptionsOutOfRange) {
  const at::Tensor param = torch::ones({3}).set_requires_grad(true);
  EXPECT_THROW(Lion({param}, LionOptions(-1)), UsageError);
  EXPECT_THROW(Lion({param}, LionOptions().betas({0.9, 1.0})), UsageError);
}

} // namespace
} // namespace tessera
