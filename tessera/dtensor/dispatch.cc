// SPDX-License-Identifier: Apache-2.0
// Registers a kernel of ours for every operator that libtorch does not take
// apart itself. What a kernel does: op_kernel.cc.
#include <ATen/core/dispatch/Dispatcher.h>
#include <tessera/dtensor/op_kernel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <deque>
#include <memory>
#include <mutex>

namespace tessera {
namespace {

// Whether libtorch takes the operator apart itself before our key is reached.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(
      c10::DispatchKey::CompositeImplicitAutograd);
}

bool has_tensor_argument(const c10::OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

// Registers kernels for the operators that are known, and for later ones when
// asked again.
class Registrar {
 public:
  void scan() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const c10::OperatorName& name :
         c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op.has_value() || decomposes(*op) || !has_tensor_argument(*op) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse2)) {
        continue;
      }
      handles_.push_back(c10::Dispatcher::singleton().registerImpl(
          name,
          c10::DispatchKey::PrivateUse2,
          c10::KernelFunction::makeFromBoxedFunctor(
              std::make_unique<OpKernel>(*op, next_index_++)),
          std::nullopt,
          nullptr,
          "tessera"));
    }
  }

 private:
  std::mutex mutex_;
  std::deque<c10::RegistrationHandleRAII> handles_;
  size_t next_index_ = 0;
};

Registrar& registrar() {
  static auto* instance = new Registrar(); // lives as long as the dispatcher,
                                           // which outlives static destruction
  return *instance;
}

const bool kScanned = [] {
  registrar().scan();
  return true;
}();

} // namespace
} // namespace tessera

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse2, m) {
  m.fallback(torch::autograd::basicAutogradNotImplementedFallback());
}
