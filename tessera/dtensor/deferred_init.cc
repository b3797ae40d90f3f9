// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/deferred_init.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/layout.h>

#include <utility>

namespace tessera {

void DeferredInit::record(
    const c10::OperatorHandle& op,
    std::vector<c10::IValue> arguments,
    const RandomState& before) {
  initialisers_.push_back({op, std::move(arguments), before});
}

std::shared_ptr<DeferredInit> DeferredInit::clone() const {
  auto copy = std::make_shared<DeferredInit>(spec_);
  copy->initialisers_ = initialisers_;
  return copy;
}

void DeferredInit::materialise() {
  if (is_materialised()) {
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard no_deferral(
      c10::DispatchKey::DeferredInit);
  at::NoGradGuard no_grad;
  const World& world = spec_->mesh.world();
  const RandomState now = random_state(world);
  local_ = empty_local(spec_, at::TensorOptions().device(spec_->mesh.device()));
  const at::Tensor tensor = DTensorImpl::wrap(local_, spec_);
  for (const Initialiser& initialiser : initialisers_) {
    set_random_state(world, initialiser.before);
    torch::jit::Stack stack{tensor};
    stack.insert(
        stack.end(),
        initialiser.arguments.begin(),
        initialiser.arguments.end());
    initialiser.op.callBoxed(stack);
  }
  set_random_state(world, now);
  initialisers_.clear();
}

} // namespace tessera
