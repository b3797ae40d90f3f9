// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/mul.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/lion.h>
#include <torch/optim/serialize.h>

#include <memory>

namespace tessera {
namespace {

bool is_decay_rate(double beta) {
  return beta >= 0 && beta < 1;
}

void require_valid(const LionOptions& options) {
  const auto [beta1, beta2] = options.betas();
  if (!(options.lr() >= 0) || !(options.weight_decay() >= 0) ||
      !is_decay_rate(beta1) || !is_decay_rate(beta2)) {
    throw UsageError(fmt::format(
        "Lion: got lr {}, betas ({}, {}), weight_decay {}; expected lr and "
        "weight_decay of at least 0, and betas in [0, 1)",
        options.lr(),
        beta1,
        beta2,
        options.weight_decay()));
  }
}

void update(
    at::Tensor& param,
    const at::Tensor& gradient,
    at::Tensor& average,
    const LionOptions& options) {
  const auto [beta1, beta2] = options.betas();
  param.mul_(1 - options.lr() * options.weight_decay());
  const at::Tensor direction =
      at::mul(average, beta1).add_(at::mul(gradient, 1 - beta1));
  param.add_(at::sign(direction), -options.lr());
  average.mul_(beta2).add_(at::mul(gradient, 1 - beta2));
}

} // namespace

LionOptions::LionOptions(double learning_rate) : lr_(learning_rate) {}

void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

double LionOptions::get_lr() const {
  return lr();
}

void LionOptions::set_lr(double learning_rate) {
  lr(learning_rate);
}

void LionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
}

void LionParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
}

Lion::Lion(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    const LionOptions& defaults)
    : Optimizer(param_groups, std::make_unique<LionOptions>(defaults)) {
  require_valid(defaults);
  for (const auto& group : param_groups_) {
    require_valid(static_cast<const LionOptions&>(group.options()));
  }
}

Lion::Lion(std::vector<torch::Tensor> params, const LionOptions& defaults)
    : Lion({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

torch::Tensor Lion::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enabled(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const LionOptions&>(group.options());
    for (at::Tensor& param : group.params()) {
      if (!param.grad().defined()) {
        continue;
      }
      auto& state = state_[param.unsafeGetTensorImpl()];
      if (state == nullptr) {
        auto fresh = std::make_unique<LionParamState>();
        fresh->exp_avg(at::zeros_like(param, at::MemoryFormat::Preserve));
        state = std::move(fresh);
      }
      update(
          param,
          param.grad(),
          static_cast<LionParamState&>(*state).exp_avg(),
          options);
    }
  }
  return loss;
}

void Lion::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

} // namespace tessera
