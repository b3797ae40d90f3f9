// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {

// Chained setters and getters, as torch's options have them.
struct LionOptions
    : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  // NOLINTNEXTLINE(google-explicit-constructor): a number is a learning rate
  LionOptions(double learning_rate = 1e-4);
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-4; // positive
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99); // each in [0, 1)
  TORCH_ARG(double, weight_decay) = 0; // decoupled, times lr

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double learning_rate) override;
};

struct LionParamState
    : public torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(torch::Tensor, exp_avg);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023):
//   p <- p (1 - lr weight_decay)
//   p <- p - lr sign(beta1 m + (1 - beta1) g)
//   m <- beta2 m + (1 - beta2) g
// One state, of the parameter's size, so half of Adam's memory. Steps plain
// tensors and distributed ones; shard_optimizer shards it. Throws UsageError
// for options out of range.
class Lion : public torch::optim::Optimizer {
 public:
  explicit Lion(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      const LionOptions& defaults = {});
  explicit Lion(
      std::vector<torch::Tensor> params, const LionOptions& defaults = {});

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

} // namespace tessera
