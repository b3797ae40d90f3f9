// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <algorithm>

namespace tessera::testing {
namespace {

at::Tensor uniform(at::IntArrayRef sizes, int64_t seed) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::rand(sizes, generator) - 0.5;
}

torch::optim::SGDOptions sgd_options(Rule rule) {
  torch::optim::SGDOptions options(0.01);
  if (rule != Rule::kSgd) {
    options.momentum(0.9);
  }
  return options.nesterov(rule == Rule::kNesterov)
      .weight_decay(0.01)
      .dampening(rule == Rule::kSgdMomentum ? 0.1 : 0);
}

// Calls `use` with a fresh torch optimizer.
template <typename Use>
auto with_optimizer(Rule rule, Tensors params, Use&& use) {
  switch (rule) {
    case Rule::kAdamW:
      return use(torch::optim::AdamW(
          std::move(params),
          torch::optim::AdamWOptions(0.01).weight_decay(0.1)));
    case Rule::kAdam:
      return use(torch::optim::Adam(
          std::move(params),
          torch::optim::AdamOptions(0.01).weight_decay(0.01)));
    case Rule::kRmsprop:
      return use(torch::optim::RMSprop(
          std::move(params),
          torch::optim::RMSpropOptions(0.01)
              .momentum(0.9)
              .centered(true)
              .eps(1e-3)
              .weight_decay(0.01)));
    case Rule::kAdagrad:
      return use(torch::optim::Adagrad(
          std::move(params),
          torch::optim::AdagradOptions(0.01)
              .lr_decay(0.1)
              .initial_accumulator_value(0.2)
              .weight_decay(0.01)));
    case Rule::kLion:
      return use(Lion(std::move(params), LionOptions(0.01).weight_decay(0.1)));
    default:
      return use(torch::optim::SGD(std::move(params), sgd_options(rule)));
  }
}

void backward_with_ones(const at::Tensor& output) {
  output.backward(at::ones_like(output));
}

} // namespace

Model uneven_mlp() {
  Model model;
  model.values = {
      uniform({13, 10}, 1),
      uniform({13}, 2),
      uniform({7, 13}, 3),
      uniform({7}, 4),
      uniform({}, 5) + 1.5,
      uniform({1}, 6) + 1.5};
  model.forward = [](const Tensors& p, const at::Tensor& x) {
    const at::Tensor hidden = torch::relu(torch::linear(x, p[0], p[1]));
    return torch::linear(hidden, p[2], p[3]) * p[4] * p[5];
  };
  return model;
}

Model linear() {
  return {
      {uniform({10, 10}, 1), uniform({10}, 2)},
      [](const Tensors& p, const at::Tensor& x) {
        return torch::linear(x, p[0], p[1]);
      }};
}

std::unique_ptr<torch::optim::Optimizer> plain_optimizer(
    Rule rule, Tensors params) {
  return with_optimizer(
      rule,
      std::move(params),
      [](auto&& optimizer) -> std::unique_ptr<torch::optim::Optimizer> {
        return std::make_unique<std::decay_t<decltype(optimizer)>>(
            std::forward<decltype(optimizer)>(optimizer));
      });
}

ShardedOptimizer sharded_optimizer(
    Rule rule,
    Tensors params,
    const ShardingStage& stage,
    const ShardOptions& options) {
  return with_optimizer(rule, std::move(params), [&](auto&& optimizer) {
    return shard_optimizer(
        std::forward<decltype(optimizer)>(optimizer), stage, options);
  });
}

at::Tensor leaf(const at::Tensor& value) {
  return value.detach().clone().set_requires_grad(true);
}

at::Tensor distributed_leaf(
    const at::Tensor& value,
    const DeviceMesh& mesh,
    const Placements& placements) {
  return distribute(value, mesh, placements).detach().set_requires_grad(true);
}

Tensors train_plain(
    const Model& model, const at::Tensor& batch, const Training& training) {
  Tensors params;
  std::ranges::transform(model.values, std::back_inserter(params), leaf);
  const auto optimizer = plain_optimizer(training.rule, params);
  for (int64_t step = 0; step < training.steps; ++step) {
    for (int64_t pass = 0; pass < training.passes; ++pass) {
      backward_with_ones(model.forward(params, batch));
    }
    if (training.clip) {
      torch::nn::utils::clip_grad_norm_(params, *training.clip);
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  return params;
}

Tensors train_sharded(
    const Model& model,
    const at::Tensor& batch,
    const DeviceMesh& mesh,
    const std::vector<Placements>& param_placements,
    const Placements& batch_placements,
    const std::string& axis,
    const Training& training) {
  Tensors params;
  for (size_t i = 0; i < model.values.size(); ++i) {
    params.push_back(
        distributed_leaf(model.values[i], mesh, param_placements[i]));
  }
  const at::Tensor x = distribute(batch, mesh, batch_placements);
  auto optimizer = sharded_optimizer(
      training.rule, params, ShardingStage1(axis), {training.sync});
  for (int64_t step = 0; step < training.steps; ++step) {
    for (int64_t pass = 0; pass < training.passes; ++pass) {
      backward_with_ones(model.forward(params, x));
    }
    if (training.clip) {
      optimizer.clip_grad_norm(*training.clip);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  Tensors values;
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_EQ(str(placements_of(params[i])), str(param_placements[i]))
        << "parameter " << i;
    values.push_back(full_tensor(params[i]).detach());
  }
  return values;
}

double largest_difference(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor difference = (a[i] - b[i]).abs().max() / b[i].abs().max();
    largest = std::max(largest, difference.item<double>());
  }
  return largest;
}

std::string name_of(GradientSync sync) {
  switch (sync) {
    case GradientSync::kDefault:
      return "Default";
    case GradientSync::kImplicit:
      return "Implicit";
    case GradientSync::kAllReduce:
      return "AllReduce";
    case GradientSync::kReduceScatter:
      return "ReduceScatter";
    case GradientSync::kBucketed:
      break;
  }
  return "Bucketed";
}

std::string name_of(Rule rule) {
  switch (rule) {
    case Rule::kAdamW:
      return "AdamW";
    case Rule::kAdam:
      return "Adam";
    case Rule::kSgd:
      return "Sgd";
    case Rule::kSgdMomentum:
      return "SgdMomentum";
    case Rule::kNesterov:
      return "Nesterov";
    case Rule::kRmsprop:
      return "Rmsprop";
    case Rule::kAdagrad:
      return "Adagrad";
    case Rule::kLion:
      break;
  }
  return "Lion";
}

} // namespace tessera::testing
