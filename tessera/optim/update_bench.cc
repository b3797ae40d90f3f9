// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/update_bench.h>
#include <tessera/optim/update_kernel.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kTensors = 100;
constexpr int64_t kPerTensor = 500'000;
constexpr int64_t kElements = kTensors * kPerTensor;
constexpr int kRepetitions = 9;

// What is compared, each a function that makes one step.
struct Contender {
  std::string name;
  std::function<void()> step;
  double best_ms = std::numeric_limits<double>::infinity();
};

// Interleaved, so that all see the same disturbances; the best of each counts.
void measure(std::vector<Contender>& contenders) {
  for (int repetition = 0; repetition <= kRepetitions; ++repetition) {
    for (Contender& contender : contenders) {
      const auto begin = std::chrono::steady_clock::now();
      contender.step();
      const std::chrono::duration<double, std::milli> time =
          std::chrono::steady_clock::now() - begin;
      if (repetition > 0) { // the first one makes states
        contender.best_ms = std::min(contender.best_ms, time.count());
      }
    }
  }
}

at::Tensor filled(double value) {
  return at::full({kElements}, value, at::kFloat);
}

// All tensors are parts of one buffer.
std::vector<at::Tensor> parts(const at::Tensor& flat) {
  return flat.split(kPerTensor);
}

Contender torch_adamw(const at::Tensor& value, const at::Tensor& gradient) {
  std::vector<at::Tensor> params;
  const auto gradients = parts(gradient);
  for (const at::Tensor& part : parts(value)) {
    params.push_back(part.clone().set_requires_grad(true));
    params.back().mutable_grad() = gradients[params.size() - 1];
  }
  auto optimizer = std::make_shared<torch::optim::AdamW>(
      std::move(params), torch::optim::AdamWOptions(1e-3));
  return {"torch_adamw/100_tensors", [optimizer] { optimizer->step(); }};
}

Contender fused_adamw(const at::Tensor& value, const at::Tensor& gradient) {
  const at::Tensor param = value.clone();
  const at::Tensor first = filled(0);
  const at::Tensor second = filled(0);
  const at::Tensor step = at::full({}, 1.0, at::kFloat);
  return {"at_fused_adamw/flat", [=] {
            at::_fused_adamw_(
                {param},
                {gradient},
                {first},
                {second},
                {},
                {step},
                1e-3,
                0.9,
                0.999,
                0.01,
                1e-8,
                false,
                false);
          }};
}

// One pass over the flat buffer. A dtype of 16 bits has float32 masters.
Contender one_pass(
    const std::string& name,
    UpdateRule rule,
    const std::shared_ptr<ParamOptions>& options,
    const at::Tensor& value,
    const at::Tensor& gradient,
    c10::ScalarType dtype = c10::kFloat) {
  const at::Tensor master = value.clone();
  const at::Tensor param = dtype == c10::kFloat ? master : master.to(dtype);
  const at::Tensor own_gradient = gradient.to(dtype);
  std::vector<at::Tensor> states;
  for (const StateField& field : state_fields(rule, *options)) {
    states.push_back(filled(field.initial));
  }
  return {name, [=] {
            const void* source = own_gradient.const_data_ptr();
            UpdateRange range;
            range.parameter = param.mutable_data_ptr();
            range.parameter_type = dtype;
            range.master =
                dtype == c10::kFloat ? nullptr : master.data_ptr<float>();
            range.gradients = {&source, 1};
            range.gradient_type = dtype;
            std::ranges::transform(
                states, range.states.begin(), [](const at::Tensor& state) {
                  return state.mutable_data_ptr();
                });
            range.numel = kElements;
            run_update(rule, *options, {.step = 2}, range);
          }};
}

std::vector<Contender> all_contenders(
    const at::Tensor& value, const at::Tensor& gradient) {
  using namespace torch::optim;
  const auto ours = [&](const std::string& name,
                        UpdateRule rule,
                        auto options,
                        c10::ScalarType dtype = c10::kFloat) {
    return one_pass(
        "one_pass/" + name,
        rule,
        std::make_shared<decltype(options)>(options),
        value,
        gradient,
        dtype);
  };
  return {
      torch_adamw(value, gradient),
      fused_adamw(value, gradient),
      ours("adamw", UpdateRule::kAdamW, AdamWOptions(1e-3)),
      ours(
          "adamw_bfloat16",
          UpdateRule::kAdamW,
          AdamWOptions(1e-3),
          c10::kBFloat16),
      ours("adam_amsgrad", UpdateRule::kAdam, AdamOptions(1e-3).amsgrad(true)),
      ours("sgd_momentum", UpdateRule::kSgd, SGDOptions(1e-3).momentum(0.9)),
      ours("rmsprop", UpdateRule::kRmsprop, RMSpropOptions(1e-3)),
      ours("adagrad", UpdateRule::kAdagrad, AdagradOptions(1e-3)),
      ours("lion", UpdateRule::kLion, LionOptions(1e-4))};
}

} // namespace

std::vector<BenchRow> measure_updates() {
  std::vector<BenchRow> rows;
  const int before = at::get_num_threads();
  const at::Tensor value = filled(0.5);
  const at::Tensor gradient = filled(1e-3);
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    auto contenders = all_contenders(value, gradient);
    measure(contenders);
    const auto name = [&](const Contender& contender) {
      return fmt::format("update/{}/{}_threads", contender.name, threads);
    };
    for (const size_t peer : {size_t{0}, size_t{1}}) {
      for (size_t i = peer == 0 ? 0 : 2; i < contenders.size(); ++i) {
        rows.push_back(
            {name(contenders[i]),
             contenders[i].best_ms,
             "ms",
             name(contenders[peer]),
             contenders[i].best_ms / contenders[peer].best_ms});
      }
    }
  }
  at::set_num_threads(before);
  return rows;
}

} // namespace tessera
