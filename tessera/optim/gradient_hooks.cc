// SPDX-License-Identifier: Apache-2.0
#include <tessera/optim/gradient_hooks.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace tessera {
namespace {

using torch::autograd::Variable;
using torch::autograd::variable_list;

class BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  BeforeHook(
      const at::Tensor& parameter, std::weak_ptr<GradientListener> listener)
      : parameter_(parameter.getIntrusivePtr()),
        listener_(std::move(listener)) {}

  variable_list operator()(const variable_list& gradients) override {
    const auto listener = listener_.lock();
    auto parameter = parameter_.lock();
    if (listener != nullptr && parameter && gradients[0].defined()) {
      listener->before_gradient(at::Tensor(std::move(parameter)));
    }
    return gradients;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>
      parameter_; // which owns this hook
  std::weak_ptr<GradientListener> listener_;
};

class AfterHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  AfterHook(
      std::unique_ptr<PostAccumulateGradHook> earlier,
      std::weak_ptr<GradientListener> listener)
      : earlier_(std::move(earlier)), listener_(std::move(listener)) {}

  void operator()(const Variable& parameter) override {
    if (earlier_ != nullptr) {
      (*earlier_)(parameter);
    }
    if (const auto listener = listener_.lock()) {
      listener->after_gradient(parameter);
    }
  }

 private:
  std::unique_ptr<PostAccumulateGradHook> earlier_;
  std::weak_ptr<GradientListener> listener_;
};

} // namespace

void listen_to_gradient(
    const at::Tensor& parameter, std::weak_ptr<GradientListener> listener) {
  torch::autograd::impl::hooks(parameter).push_back(
      std::make_unique<BeforeHook>(parameter, listener));
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter,
      std::make_unique<AfterHook>(std::move(slot), std::move(listener)));
}

} // namespace tessera
