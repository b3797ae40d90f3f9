// SPDX-License-Identifier: Apache-2.0
// For tests: what every language model of ours does. Templates, as the models
// share no base class with forward and loss.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::testing {

// The model, with a vocabulary of 256, never looks ahead.
template <typename Model>
void expect_causal(Model& model) {
  const at::Tensor tokens = torch::randint(0, 256, {1, 8});
  at::Tensor changed = tokens.clone();
  changed[0][5] = (tokens[0][5] + 1) % 256;
  const at::Tensor difference =
      (model.forward(tokens) - model.forward(changed)).abs().amax({0, 2});
  EXPECT_EQ(difference.narrow(0, 0, 5).max().item<float>(), 0);
  EXPECT_GT(difference[5].item<float>(), 0);
}

struct Losses {
  double first = 0;
  double last = 0;
};

// Of 30 steps on one batch.
template <typename Model>
Losses learn_one_batch(Model& model) {
  torch::optim::AdamW optimizer(
      model.parameters(), torch::optim::AdamWOptions(1e-2));
  const at::Tensor tokens = torch::randint(0, 256, {2, 9});
  Losses losses;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss =
        model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
    loss.backward();
    optimizer.step();
    losses.last = loss.item<double>();
    losses.first = step == 0 ? losses.last : losses.first;
  }
  return losses;
}

} // namespace tessera::testing
