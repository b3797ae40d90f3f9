// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/models/gpt.h>

namespace tessera {
namespace {

TEST(Gpt, ALaterTokenDoesNotTouchEarlierLogits) {
  torch::manual_seed(21);
  Gpt model(GptConfig{});
  model.eval();
  const torch::Tensor tokens = torch::randint(0, 256, {1, 8});
  torch::Tensor changed = tokens.clone();
  changed[0][5] = (tokens[0][5] + 1) % 256;
  const torch::Tensor difference =
      (model.forward(tokens) - model.forward(changed)).abs().amax({0, 2});
  EXPECT_EQ(difference.narrow(0, 0, 5).max().item<float>(), 0);
  EXPECT_GT(difference[5].item<float>(), 0);
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
  torch::optim::AdamW optimizer(
      model.parameters(), torch::optim::AdamWOptions(1e-2));
  const torch::Tensor tokens = torch::randint(0, 256, {2, 9});
  double last = 0;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss =
        model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
  }
  EXPECT_LT(last, 1);
}

TEST(Gpt, RefusesHeadsThatDoNotDivideAndLongSequences) {
  EXPECT_THROW(Gpt(GptConfig{.heads = 5}), UsageError);
  EXPECT_THROW(
      Gpt(GptConfig{.context = 4}).forward(torch::zeros({1, 5}, torch::kLong)),
      UsageError);
}

} // namespace
} // namespace tessera
