// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/models/gpt.h>
#include <tessera/models/model_testing.h>

namespace tessera {
namespace {

TEST(Gpt, ALaterTokenDoesNotTouchEarlierLogits) {
  torch::manual_seed(21);
  Gpt model(GptConfig{});
  model.eval();
  testing::expect_causal(model);
}

TEST(Gpt, DropoutActsInTrainingOnly) {
  torch::manual_seed(22);
  Gpt model(GptConfig{});
  const torch::Tensor tokens = torch::randint(0, 256, {2, 8});
  EXPECT_FALSE(torch::equal(model.forward(tokens), model.forward(tokens)));
  model.eval();
  EXPECT_TRUE(torch::equal(model.forward(tokens), model.forward(tokens)));
}

TEST(Gpt, LearnsOneBatch) {
  torch::manual_seed(23);
  Gpt model(GptConfig{.dropout = 0.0});
  EXPECT_LT(testing::learn_one_batch(model).last, 1);
}

TEST(Gpt, RefusesHeadsThatDoNotDivideAndLongSequences) {
  EXPECT_THROW(Gpt(GptConfig{.heads = 5}), UsageError);
  EXPECT_THROW(
      Gpt(GptConfig{.context = 4}).forward(torch::zeros({1, 5}, torch::kLong)),
      UsageError);
}

} // namespace
} // namespace tessera
