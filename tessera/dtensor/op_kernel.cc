// SPDX-License-Identifier: Apache-2.0
//
// How an operator on distributed tensors runs.
//
// Every operator gets a boxed kernel of its own at our dispatch key (libtorch's
// decompositions would otherwise run with plain outputs). A call goes: read the
// arguments into a key of machine words; find the plan that this signature got
// the first time; put the locals in place of the distributed tensors on the
// stack; redispatch to the locals' backend; wrap what comes back. On that path
// nothing is allocated but the results' TensorImpls. Autograd sits above us and
// sees global tensors only.
//
// Plans live in a thread-local table per operator: a small direct-mapped array
// in front of a hash map. Keys hold spec ids, which are never reused and belong
// to a world, so ranks that are threads of one process cannot meet in it. A
// plan depends only on what all ranks share, so it does not matter which rank
// still has it cached.
//
// The general path (`run_general`) does what the simple one skips: moves inputs
// to the placements that the decision wants, edits arguments, runs a stand-in
// computation, reduces raw results, brings written tensors back to their own
// placements.
#include <tessera/dtensor/op_kernel.h>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/call_key.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/fallback_log.h>
#include <tessera/dtensor/layout.h>
#include <tessera/dtensor/plan_cache.h>
#include <tessera/dtensor/redistribute.h>

#include <memory>
#include <utility>

namespace tessera {
namespace {

using torch::jit::Stack;

thread_local std::vector<std::unique_ptr<PlanCache>> caches
    __attribute__((tls_model("initial-exec")));

PlanCache& cache_of(size_t op_index) {
  if (C10_UNLIKELY(op_index >= caches.size())) {
    caches.resize(op_index + 64);
  }
  std::unique_ptr<PlanCache>& cache = caches[op_index];
  if (C10_UNLIKELY(cache == nullptr)) {
    cache = std::make_unique<PlanCache>();
  }
  return *cache;
}

} // namespace

void OpKernel::operator()(
    const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  if (C10_UNLIKELY(path_ == Path::kInplaceView)) {
    run_inplace_view(op, *stack);
    return;
  }
  const CallKey key(info_, *stack);
  PlanCache& cache = cache_of(index_);
  CacheEntry* entry = cache.find(key);
  if (C10_UNLIKELY(entry == nullptr)) {
    entry = cache.insert(key, make_plan(info_, *stack));
  }
  ExecPlan& plan = *entry->plan;
  if (C10_UNLIKELY(info_.is_view && at::GradMode::is_enabled())) {
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  }
  if (C10_UNLIKELY(!plan.simple || path_ == Path::kGeneral)) {
    run_general(op, plan, *stack);
  } else if (path_ == Path::kInplace) {
    run_inplace(op, plan, *stack);
  } else {
    run_simple(op, plan, *stack);
  }
}

OpKernel::Path OpKernel::path_of(const OpInfo& info) {
  if (info.is_inplace_view) {
    return Path::kInplaceView;
  }
  for (const OpInfo::Result& result : info.results) {
    if (result.kind != OpInfo::ResultKind::kTensor) {
      return Path::kGeneral;
    }
  }
  if (info.written_args.empty()) {
    return info.results.empty() ? Path::kGeneral : Path::kSimple;
  }
  const bool one = info.written_args.size() == 1 && info.results.size() == 1 &&
      info.results[0].alias_of == info.written_args[0] &&
      info.args[static_cast<size_t>(info.written_args[0])].kind ==
          OpInfo::ArgKind::kTensor;
  return one ? Path::kInplace : Path::kGeneral;
}

namespace {

// A view's local shares its base's version counter, as autograd expects of the
// global ones.
void share_version(const at::Tensor& view, const at::Tensor& base) {
  if (view.defined() && !view.is_inference() && !base.is_inference()) {
    view.unsafeGetTensorImpl()->set_version_counter(
        base.unsafeGetTensorImpl()->version_counter());
  }
}

[[noreturn]] void refuse_result(
    const OpInfo& info, const at::Tensor& local, SpecPtr spec) {
  throw Error(fmt::format(
      "{}: the local result is {} [{}], its rule promised [{}] of {}; this is "
      "a defect of the rule",
      info.name,
      c10::toString(local.scalar_type()),
      fmt::join(local.sizes(), ", "),
      fmt::join(spec->local_sizes, ", "),
      spec->str()));
}

void check_result(const OpInfo& info, const at::Tensor& local, SpecPtr spec) {
  if (C10_UNLIKELY(
          local.scalar_type() != spec->dtype ||
          local.sizes() != c10::IntArrayRef(spec->local_sizes))) {
    refuse_result(info, local, spec);
  }
}

[[noreturn]] void refuse_lost_write(const OpInfo& info) {
  throw UsageError(fmt::format(
      "{}: writes in place to a view that needed communication, so it is a "
      "copy and the write would be lost; write to the tensor it was made "
      "from, or redistribute that one first",
      info.name));
}

at::Tensor wrap_dynamic(
    const ExecPlan& plan,
    const ExecPlan::Output& output,
    const at::Tensor& local) {
  if (!local.defined()) {
    return local;
  }
  if (output.sizes.empty()) {
    return DTensorImpl::wrap(
        local,
        intern(
            plan.mesh,
            output.placements,
            local.sizes(),
            local.strides(),
            local.scalar_type()));
  }
  std::vector<int64_t> sizes = output.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) {
    sizes[d] = sizes[d] < 0 ? local.sizes()[d] : sizes[d];
  }
  const SpecPtr spec = intern_contiguous(
      plan.mesh, output.placements, sizes, local.scalar_type());
  return DTensorImpl::wrap(match_layout(local, spec), spec);
}

} // namespace

// The hot path.
void OpKernel::run_simple(
    const c10::OperatorHandle& op, const ExecPlan& plan, Stack& stack) const {
  const at::Tensor base = info_.is_view ? view_base(stack) : at::Tensor();
  const c10::DispatchKeySet keys = put_locals(stack);
  edit_arguments(plan, stack);
  op.redispatchBoxed(keys, &stack);
  const size_t count = info_.results.size();
  for (size_t i = 0; i < count; ++i) {
    const ExecPlan::Output& output = plan.outputs[i];
    c10::IValue& value = stack[stack.size() - count + i];
    at::Tensor local = std::move(value).toTensor();
    if (C10_UNLIKELY(output.prototype == nullptr)) {
      value = wrap_dynamic(plan, output, local);
      continue;
    }
    check_result(info_, local, output.prototype->spec());
    if (info_.is_view) {
      share_version(local, base);
    }
    value = output.prototype->wrap(std::move(local));
  }
}

// The hot path of operators that write and return one tensor.
void OpKernel::run_inplace(
    const c10::OperatorHandle& op, const ExecPlan& plan, Stack& stack) const {
  const at::Tensor self = argument(stack, info_.written_args[0]).toTensor();
  DTensorImpl* impl = DTensorImpl::get(self);
  if (C10_UNLIKELY(impl->is_copied_view())) {
    refuse_lost_write(info_);
  }
  const c10::DispatchKeySet keys = put_locals(stack);
  edit_arguments(plan, stack);
  op.redispatchBoxed(keys, &stack);
  impl->bump_local_version();
  stack.back() = self;
}

// The local tensor whose memory a view shows.
at::Tensor OpKernel::view_base(Stack& stack) const {
  const c10::IValue& value = argument(stack, 0);
  if (!value.isTensor()) {
    return {};
  }
  DTensorImpl* impl = DTensorImpl::get(value.toTensor());
  return impl != nullptr ? impl->local() : value.toTensor();
}

// Replaces every distributed tensor on the stack by its local one; says where
// to dispatch them.
c10::DispatchKeySet OpKernel::put_locals(Stack& stack) const {
  c10::DispatchKeySet keys;
  for (int position : info_.tensor_args) {
    c10::IValue& value = argument(stack, position);
    if (C10_LIKELY(value.isTensor())) {
      DTensorImpl* impl = DTensorImpl::get(value.toTensor());
      if (impl != nullptr) {
        value = impl->local();
      }
      keys = keys | value.toTensor().key_set();
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> locals = value.toTensorVector();
      for (at::Tensor& tensor : locals) {
        DTensorImpl* impl = DTensorImpl::get(tensor);
        tensor = impl != nullptr ? impl->local() : tensor;
        keys = keys | tensor.key_set();
      }
      value = std::move(locals);
    } else if (value.isList()) {
      c10::List<std::optional<at::Tensor>> locals =
          value.toOptionalTensorList().copy();
      for (size_t i = 0; i < locals.size(); ++i) {
        std::optional<at::Tensor> tensor = locals.get(i);
        if (tensor.has_value() && tensor->defined()) {
          DTensorImpl* impl = DTensorImpl::get(*tensor);
          locals.set(i, impl != nullptr ? impl->local() : *tensor);
          keys = keys | locals.get(i)->key_set();
        }
      }
      value = std::move(locals);
    }
  }
  return keys & c10::after_ADInplaceOrView_keyset;
}

// Keeps the written tensors and refuses writes that would be lost.
WrittenTensors OpKernel::take_written(Stack& stack) const {
  WrittenTensors written;
  for (int position : info_.written_args) {
    const c10::IValue& value = argument(stack, position);
    if (value.isTensor()) {
      written.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        written.push_back(tensor);
      }
    }
  }
  for (const at::Tensor& tensor : written) {
    DTensorImpl* impl = DTensorImpl::get(tensor);
    if (impl != nullptr && impl->is_copied_view()) {
      refuse_lost_write(info_);
    }
  }
  return written;
}

namespace {

at::Tensor element_of(const c10::IValue& value, int element) {
  return element < 0
      ? value.toTensor()
      : value.toListRef()[static_cast<size_t>(element)].toTensor();
}

void set_element(c10::IValue& value, int element, at::Tensor tensor) {
  if (element < 0) {
    value = std::move(tensor);
  } else if (value.isTensorList()) {
    value.toTensorList().set(static_cast<size_t>(element), std::move(tensor));
  } else {
    value.toOptionalTensorList().set(
        static_cast<size_t>(element), std::move(tensor));
  }
}

} // namespace

// The locals of written arguments that had to be moved before the computation:
// they hold the results now.
std::vector<at::Tensor> OpKernel::computed_locals(
    const ExecPlan& plan, Stack& stack) const {
  std::vector<at::Tensor> computed;
  for (const ExecPlan::Return& back : plan.returns) {
    computed.push_back(element_of(argument(stack, back.arg), back.element));
  }
  return computed;
}

// Brings written tensors back to their own placements and lets their version
// counters know.
void OpKernel::finish_written(
    const ExecPlan& plan,
    const WrittenTensors& written,
    const std::vector<at::Tensor>& computed) const {
  for (size_t i = 0; i < plan.returns.size(); ++i) {
    const at::Tensor local =
        DTensorImpl::get(written[plan.returns[i].written_index])->local();
    run_steps_into(computed[i], plan.returns[i].steps, local);
  }
  for (const at::Tensor& tensor : written) {
    DTensorImpl* impl = tensor.defined() ? DTensorImpl::get(tensor) : nullptr;
    if (impl == nullptr || tensor.is_inference()) {
      continue;
    }
    impl->bump_local_version();
    if (info_.writes_lists) { // autograd does not bump the elements of written
                              // lists
      impl->bump_version();
    }
  }
}

void OpKernel::move_inputs(const ExecPlan& plan, Stack& stack) const {
  for (const ExecPlan::Move& move : plan.moves) {
    c10::IValue& value = argument(stack, move.arg);
    // A written tensor may be computed in place too: all of it is overwritten
    // when it is brought back.
    const at::Tensor local = element_of(value, move.element);
    at::Tensor moved = run_steps(local, move.steps, !plan.copied_view);
    if (local.unsafeGetTensorImpl()->is_wrapped_number()) {
      moved.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    set_element(value, move.element, std::move(moved));
  }
}

void OpKernel::run_general(
    const c10::OperatorHandle& op, ExecPlan& plan, Stack& stack) const {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  AskerScope asker(info_.name.c_str());
  if (plan.decision.fallback) {
    count_fallback(plan, info_);
  }
  const WrittenTensors written = take_written(stack);
  const at::Tensor base =
      info_.is_view && !plan.copied_view ? view_base(stack) : at::Tensor();
  LocalCall call{op, info_, put_locals(stack), plan};
  move_inputs(plan, stack);
  edit_arguments(plan, stack);
  const std::vector<at::Tensor> computed = computed_locals(plan, stack);
  run_local_kernel(call, stack);
  finish_written(plan, written, computed);
  std::vector<at::Tensor> results = finished_locals(plan, stack, call);
  for (size_t i = 0; i < results.size(); ++i) {
    const ExecPlan::Output& output = plan.outputs[i];
    if (!results[i].defined()) {
      continue;
    }
    if (base.defined()) {
      share_version(results[i], base);
    }
    if (output.prototype != nullptr) {
      check_result(info_, results[i], output.prototype->spec());
      results[i] = output.prototype->wrap(results[i]);
    } else {
      results[i] = wrap_dynamic(plan, output, results[i]);
    }
    if (plan.copied_view) {
      DTensorImpl::get(results[i])->mark_copied_view();
    }
  }
  put_results(stack, written, results);
}

namespace {

bool is_fresh_result(const OpInfo::Result& result) {
  return result.alias_of < 0 && result.kind != OpInfo::ResultKind::kOther;
}

// Appends every fresh tensor of the results to `flat`.
void flatten_results(
    const OpInfo& info, const Stack& stack, std::vector<at::Tensor>& flat) {
  const size_t count = info.results.size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    if (!is_fresh_result(info.results[i])) {
      continue;
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        flat.push_back(tensor);
      }
    } else {
      flat.push_back(value.toTensor());
    }
  }
}

} // namespace

// The fresh results' locals in their final placements and layout.
std::vector<at::Tensor> OpKernel::finished_locals(
    ExecPlan& plan, Stack& stack, LocalCall& call) const {
  std::vector<at::Tensor> locals;
  flatten_results(info_, stack, locals);
  if (!plan.outputs_ready) {
    learn_outputs(plan, locals, info_.is_view && !plan.copied_view);
  }
  for (size_t i = 0; i < locals.size(); ++i) {
    const ExecPlan::Output& output = plan.outputs[i];
    if (!locals[i].defined()) {
      continue;
    }
    if (!output.steps.empty()) {
      locals[i] = run_steps(locals[i], output.steps, true);
    }
    if (output.relayout) {
      locals[i] = match_layout(locals[i], output.prototype->spec());
    }
  }
  finish_results(call, locals);
  return locals;
}

// Puts distributed results where the local ones are on the stack; written
// arguments are returned as themselves.
void OpKernel::put_results(
    Stack& stack,
    const WrittenTensors& written,
    const std::vector<at::Tensor>& wrapped) const {
  size_t next = 0;
  size_t next_written = 0;
  const size_t count = info_.results.size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = stack[stack.size() - count + i];
    const bool list = value.isTensorList();
    if (info_.results[i].kind == OpInfo::ResultKind::kOther) {
      continue;
    }
    std::vector<at::Tensor> tensors;
    const bool fresh = is_fresh_result(info_.results[i]);
    const size_t size = list ? value.toTensorVector().size() : 1;
    for (size_t k = 0; k < size; ++k) {
      tensors.push_back(fresh ? wrapped.at(next++) : written[next_written++]);
    }
    value = list ? c10::IValue(std::move(tensors)) : c10::IValue(tensors[0]);
  }
}

// t_, squeeze_, unsqueeze_ and their like: the functional twin runs, and the
// tensor becomes its result.
void OpKernel::run_inplace_view(
    const c10::OperatorHandle& op, Stack& stack) const {
  const at::Tensor self = argument(stack, 0).toTensor();
  std::string twin_name = op.operator_name().name;
  twin_name.pop_back();
  const auto twin = c10::Dispatcher::singleton().findSchema(
      {twin_name, op.operator_name().overload_name});
  if (!twin.has_value() ||
      twin->schema().arguments().size() != info_.args.size()) {
    throw UsageError(fmt::format(
        "{}: cannot change a distributed tensor in place; make a new one "
        "instead",
        info_.name));
  }
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  twin->callBoxed(stack);
  DTensorImpl* source = DTensorImpl::get(stack.back().toTensor());
  DTensorImpl::get(self)->reset(source->local(), source->spec());
  stack.back() = self;
}

} // namespace tessera
