// SPDX-License-Identifier: Apache-2.0
// What the tests of this room share: a model as a function of its parameters,
// so that the same code runs plain and distributed.
#pragma once

#include <tessera/comm/run_ranks.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/sharded_optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

struct Model {
  Tensors values; // of the parameters
  std::function<at::Tensor(const Tensors& params, const at::Tensor& batch)>
      forward;
};

// Two layers whose shapes divide by nothing, and a scale and a gain of one
// element (0-d and [1]).
Model uneven_mlp();

// Linear(10, 10).
Model linear();

enum class Rule {
  kAdamW,
  kAdam,
  kSgd,
  kSgdMomentum,
  kNesterov,
  kRmsprop,
  kAdagrad,
  kLion
};

struct Training {
  Rule rule = Rule::kAdamW;
  GradientSync sync = GradientSync::kReduceScatter;
  std::optional<double> clip;
  int64_t steps = 5;
  int64_t passes = 1; // backward passes that a step accumulates
};

// torch's own optimizer. 0.01 as learning rate.
std::unique_ptr<torch::optim::Optimizer> plain_optimizer(
    Rule rule, Tensors params);
ShardedOptimizer sharded_optimizer(
    Rule rule,
    Tensors params,
    const ShardingStage& stage,
    const ShardOptions& options);

// A leaf that requires a gradient.
at::Tensor leaf(const at::Tensor& value);
at::Tensor distributed_leaf(
    const at::Tensor& value,
    const DeviceMesh& mesh,
    const Placements& placements);

// Trains one rank with plain torch; the loss is the output with ones as its
// gradient. Returns the parameters.
Tensors train_plain(
    const Model& model, const at::Tensor& batch, const Training& training);

// The same on the mesh. Returns the full values of the parameters, and checks
// that each is at rest in its placements.
Tensors train_sharded(
    const Model& model,
    const at::Tensor& batch,
    const DeviceMesh& mesh,
    const std::vector<Placements>& param_placements,
    const Placements& batch_placements,
    const std::string& axis,
    const Training& training);

// The largest |a - b| over the largest |b|, over all tensors.
double largest_difference(const Tensors& a, const Tensors& b);

std::string name_of(GradientSync sync);
std::string name_of(Rule rule);

} // namespace tessera::testing
