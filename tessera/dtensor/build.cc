// SPDX-License-Identifier: Apache-2.0
//
// Building a module whose parameters are born distributed.
//
// In C++ a module's members cannot be swapped after construction, so the
// constructor itself must make distributed tensors. It runs with the
// DeferredInit dispatch key switched on, whose fallback (this file) sees every
// operator first:
//   - a factory (empty, zeros, ones, full, rand, randn) gives a replicated
//   distributed tensor that does not exist yet: a DeferredInit;
//   - an in-place initialiser of such a tensor (uniform_, fill_, ...) is
//   recorded instead of run;
//   - clone of such a tensor clones the record;
//   - anything else runs as usual, for which tensors that do not exist yet are
//   made, replicated; a fresh result of plain tensors only
//     (arange, from_blob().clone(), ...) becomes a replicated distributed
//     tensor.
// Random initialisers take their place in the world's stream when they are
// recorded, so values do not depend on what is made when. When the constructor
// is done each parameter and buffer gets its placements, and only this rank's
// part is made.
#include <tessera/dtensor/build.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/autograd_functions.h>
#include <tessera/dtensor/deferred_init.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/random_kernels.h>
#include <tessera/dtensor/random_stream.h>
#include <tessera/dtensor/redistribute.h>
#include <torch/library.h>

#include <array>
#include <unordered_set>

namespace tessera {

struct BuildScope::Impl {
  DeviceMesh mesh;
  bool constructing = true;
};

namespace {

using torch::jit::Stack;

// The mesh that the module under construction on this thread goes to.
thread_local const DeviceMesh* building = nullptr;

template <typename F>
void for_each_tensor(Stack& stack, size_t count, F f) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    c10::IValue& value = stack[i];
    if (value.isTensor() && value.toTensor().defined()) {
      f(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        f(tensor);
      }
    }
  }
}

bool any_distributed(Stack& stack, size_t count) {
  bool found = false;
  for_each_tensor(stack, count, [&](const at::Tensor& tensor) {
    found = found || is_dtensor(tensor);
  });
  return found;
}

// What a factory fills its tensor with: the in-place operator and where its
// arguments stand in the factory's.
struct Factory {
  const char* name;
  const char* initialiser; // null: uninitialised
  const char* overload;
};

const Factory* find_factory(const c10::OperatorName& name) {
  static constexpr std::array<Factory, 7> kFactories = {{
      {"aten::empty", nullptr, ""},
      {"aten::empty_strided", nullptr, ""},
      {"aten::zeros", "aten::zero_", ""},
      {"aten::ones", "aten::fill_", "Scalar"},
      {"aten::full", "aten::fill_", "Scalar"},
      {"aten::rand", "aten::uniform_", ""},
      {"aten::randn", "aten::normal_", ""},
  }};
  for (const Factory& factory : kFactories) {
    const bool plain_overload =
        name.overload_name.empty() || name.overload_name == "memory_format";
    if (name.name == factory.name && plain_overload) {
      return &factory;
    }
  }
  return nullptr;
}

std::vector<c10::IValue> initialiser_arguments(
    const Factory& factory, const c10::IValue& fill) {
  const std::string_view name = factory.initialiser;
  if (name == "aten::fill_") {
    return {fill};
  }
  if (name == "aten::uniform_") {
    return {0.0, 1.0, c10::IValue()};
  }
  if (name == "aten::normal_") {
    return {0.0, 1.0, c10::IValue()};
  }
  return {};
}

// The factory's result by shape alone.
at::Tensor meta_result(const c10::OperatorHandle& op, Stack stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") {
      stack[stack.size() - arguments.size() + i] = c10::Device(c10::kMeta);
    } else if (arguments[i].name() == "pin_memory") {
      stack[stack.size() - arguments.size() + i] = c10::IValue();
    }
  }
  op.callBoxed(stack);
  return stack.back().toTensor();
}

void run_factory(
    const c10::OperatorHandle& op, const Factory& factory, Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor shape = meta_result(op, stack);
  const c10::IValue fill = op.operator_name().name == "aten::full"
      ? stack[stack.size() - count + 1]
      : c10::IValue(1);
  const SpecPtr spec = intern(
      *building,
      replicated(*building),
      shape.sizes(),
      shape.strides(),
      shape.scalar_type());
  auto deferred = std::make_shared<DeferredInit>(spec);
  if (factory.initialiser != nullptr) {
    const auto initialiser = c10::Dispatcher::singleton().findSchemaOrThrow(
        factory.initialiser, factory.overload);
    const bool random = has_random_kernel(factory.initialiser);
    deferred->record(
        initialiser,
        initialiser_arguments(factory, fill),
        random ? draw(building->world()) : random_state(building->world()));
  }
  torch::jit::drop(stack, count);
  stack.emplace_back(DTensorImpl::wrap_deferred(std::move(deferred), spec));
}

bool is_distributed_anywhere(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

// An in-place initialiser of a tensor that does not exist yet: writes its first
// argument, returns it, reads no other tensor.
bool is_recordable(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  if (count == 0 || schema.returns().size() != 1 ||
      op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  const c10::AliasInfo* alias = schema.arguments()[0].alias_info();
  const c10::IValue& self = stack[stack.size() - count];
  if (alias == nullptr || !alias->isWrite() || !self.isTensor() ||
      !is_dtensor(self.toTensor())) {
    return false;
  }
  for (size_t i = 1; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    if (is_distributed_anywhere(value) || value.isTensorList()) {
      return false;
    }
  }
  DTensorImpl* impl = DTensorImpl::get(self.toTensor());
  return impl->is_deferred() && impl->deferred() != nullptr &&
      !impl->deferred()->is_materialised();
}

void record(const c10::OperatorHandle& op, Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(count);
  const at::Tensor self = first->toTensor();
  const std::string& name = op.operator_name().name;
  const std::string full = op.operator_name().overload_name.empty()
      ? name
      : name + "." + op.operator_name().overload_name;
  const World& world = building->world();
  const RandomState before =
      has_random_kernel(full) ? draw(world) : random_state(world);
  DTensorImpl::get(self)->deferred()->record(
      op, {first + 1, stack.end()}, before);
  torch::jit::drop(stack, count);
  stack.emplace_back(self);
}

bool clones_deferred(const c10::OperatorHandle& op, const Stack& stack) {
  if (op.operator_name().name != "aten::clone") {
    return false;
  }
  const at::Tensor& self = stack[stack.size() - 2].toTensor();
  DTensorImpl* impl = DTensorImpl::get(self);
  return impl != nullptr && impl->is_deferred() &&
      impl->deferred() != nullptr && !impl->deferred()->is_materialised() &&
      !self.requires_grad();
}

bool aliases_an_input(
    const at::Tensor& result, const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) {
    if (result.is_same(input) ||
        (!is_dtensor(input) && input.has_storage() && result.has_storage() &&
         result.is_alias_of(input))) {
      return true;
    }
  }
  return false;
}

void wrap_fresh_results(
    const c10::OperatorHandle& op,
    Stack& stack,
    const std::vector<at::Tensor>& inputs) {
  const size_t count = op.schema().returns().size();
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) {
      continue;
    }
    const at::Tensor result = stack[i].toTensor();
    const bool wraps = !is_dtensor(result) &&
        result.layout() == c10::kStrided &&
        result.device() == building->device();
    if (wraps && !aliases_an_input(result, inputs)) {
      const SpecPtr spec = intern(
          *building,
          replicated(*building),
          result.sizes(),
          result.strides(),
          result.scalar_type());
      stack[i] = DTensorImpl::wrap(result, spec);
    }
  }
}

// Every operator of a constructor comes here first.
void deferred_fallback(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::DispatchKeySet below = keys &
      c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                          c10::DispatchKey::DeferredInit);
  const bool composite =
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  const Factory* factory =
      building == nullptr ? nullptr : find_factory(op.operator_name());
  if (building == nullptr || (composite && factory == nullptr)) {
    op.redispatchBoxed(below, stack); // its parts come back here
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::DeferredInit);
  if (factory != nullptr) {
    run_factory(op, *factory, *stack);
  } else if (is_recordable(op, *stack)) {
    record(op, *stack);
  } else if (clones_deferred(op, *stack)) {
    const SpecPtr spec =
        DTensorImpl::get((*stack)[stack->size() - 2].toTensor())->spec();
    auto copy = DTensorImpl::get((*stack)[stack->size() - 2].toTensor())
                    ->deferred()
                    ->clone();
    torch::jit::drop(*stack, 2);
    stack->emplace_back(DTensorImpl::wrap_deferred(std::move(copy), spec));
  } else {
    const size_t count = op.schema().arguments().size();
    std::vector<at::Tensor> inputs;
    for_each_tensor(*stack, count, [&](const at::Tensor& tensor) {
      inputs.push_back(tensor);
    });
    const bool distributed = any_distributed(*stack, count);
    op.redispatchBoxed(below, stack);
    if (!distributed) {
      wrap_fresh_results(op, *stack, inputs);
    }
  }
}

void place(
    at::Tensor& tensor,
    const std::string& name,
    const PlacementFor& placement_for,
    const DeviceMesh& mesh) {
  DTensorImpl* impl = tensor.defined() ? DTensorImpl::get(tensor) : nullptr;
  if (impl == nullptr) {
    throw UsageError(fmt::format(
        "build: {} is {}; a parameter or buffer must be made by the "
        "constructor, on its own thread, from factories such as torch::empty",
        name,
        tensor.defined() ? "a plain tensor" : "undefined"));
  }
  prepare_leaf(tensor);
  const Placements placements = placement_for
      ? placement_for(name, impl->spec()->sizes)
      : replicated(mesh);
  const SpecPtr to = with_placements(impl->spec(), placements);
  if (to->has_partial()) {
    throw UsageError(fmt::format(
        "build: {} is placed {}; a parameter or buffer is Shard or Replicate "
        "on every axis",
        name,
        str(placements)));
  }
  if (impl->is_deferred() && !impl->deferred()->is_materialised()) {
    impl->deferred()->place(to->placements);
    impl->local();
    return;
  }
  const at::Tensor local = impl->local();
  if (impl->spec() != to) {
    impl->reset(
        run_steps(local, plan_redistribution(impl->spec(), to, CostModel())),
        to);
  }
}

} // namespace

BuildScope::BuildScope(const DeviceMesh& mesh)
    : impl_(std::make_unique<Impl>()) {
  if (building != nullptr) {
    throw UsageError(
        "build: a module is under construction on this thread already; build "
        "the outermost one only");
  }
  impl_->mesh = mesh;
  building = &impl_->mesh;
  c10::impl::tls_set_dispatch_key_included(
      c10::DispatchKey::DeferredInit, true);
}

BuildScope::~BuildScope() {
  if (impl_->constructing) {
    c10::impl::tls_set_dispatch_key_included(
        c10::DispatchKey::DeferredInit, false);
    building = nullptr;
  }
}

void BuildScope::materialise(
    torch::nn::Module& module, const PlacementFor& placement_for) {
  c10::impl::tls_set_dispatch_key_included(
      c10::DispatchKey::DeferredInit, false);
  building = nullptr;
  impl_->constructing = false;
  at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*>
      placed; // tied tensors have several names; the first one counts
  auto place_all = [&](auto named) {
    for (auto& item : named) {
      if (placed.insert(item.value().unsafeGetTensorImpl()).second) {
        place(item.value(), item.key(), placement_for, impl_->mesh);
      }
    }
  };
  place_all(module.named_parameters());
  place_all(module.named_buffers());
}

} // namespace tessera

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(
      torch::CppFunction::makeFromBoxedFunction<&tessera::deferred_fallback>());
}
