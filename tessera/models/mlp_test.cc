// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/models/mlp.h>

namespace tessera {
namespace {

TEST(Mlp, EqualsItsLayersWrittenOut) {
  torch::manual_seed(31);
  Mlp model({5, 7, 3});
  auto p = model.named_parameters();
  const torch::Tensor x = torch::randn({4, 5});
  const torch::Tensor hidden =
      torch::gelu(torch::matmul(x, p["0.weight"].t()) + p["0.bias"]);
  EXPECT_TRUE(torch::allclose(
      model.forward(x),
      torch::matmul(hidden, p["1.weight"].t()) + p["1.bias"],
      1e-5,
      1e-6));
}

TEST(Mlp, DropoutActsInTrainingOnly) {
  torch::manual_seed(32);
  Mlp model({5, 64, 3}, 0.5);
  const torch::Tensor x = torch::randn({4, 5});
  EXPECT_FALSE(torch::equal(model.forward(x), model.forward(x)));
  model.eval();
  EXPECT_TRUE(torch::equal(model.forward(x), model.forward(x)));
}

TEST(Mlp, RefusesASingleWidth) {
  EXPECT_THROW(Mlp({5}), UsageError);
}

} // namespace
} // namespace tessera
