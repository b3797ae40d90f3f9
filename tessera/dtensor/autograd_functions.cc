// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/autograd_functions.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/layout.h>
#include <tessera/dtensor/redistribute.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A spec in an autograd context: specs live until the process ends.
c10::IValue keep(SpecPtr spec) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(spec));
}

// Another tensor on the same memory and version counter that autograd knows
// nothing of.
at::Tensor untracked_alias(const at::Tensor& tensor) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::Tensor result = at::alias(tensor);
  if (!result.is_inference() && !tensor.is_inference()) {
    result.unsafeGetTensorImpl()->set_version_counter(
        tensor.unsafeGetTensorImpl()->version_counter());
  }
  return result;
}

// Autograd's arguments and saved data hold numbers, no pointers of ours.
SpecPtr spec_at(int64_t address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<SpecPtr>(static_cast<intptr_t>(address));
}

SpecPtr kept(AutogradContext* context, const char* name) {
  return spec_at(context->saved_data.at(name).toInt());
}

// Plain gradients in a graph of distributed tensors count as replicated.
SpecPtr spec_or_replicated(const at::Tensor& gradient, const DeviceMesh& mesh) {
  if (is_dtensor(gradient)) {
    return spec_of(gradient);
  }
  return intern_contiguous(
      mesh, replicated(mesh), gradient.sizes(), gradient.scalar_type());
}

at::Tensor moved(
    const at::Tensor& tensor,
    SpecPtr from,
    const Placements& placements,
    bool may_alias) {
  const SpecPtr to = with_placements(from, placements);
  const at::Tensor& local = is_dtensor(tensor) ? local_of(tensor) : tensor;
  return run_steps(
      local, plan_redistribution(from, to, CostModel()), may_alias);
}

at::Tensor moved_dtensor(
    const at::Tensor& tensor, SpecPtr from, const Placements& placements) {
  return wrap_local(
      moved(tensor, from, placements, false),
      with_placements(from, placements));
}

// Where the gradient of a tensor with these placements goes, given where it is.
Placements gradient_placements(
    const Placements& of, const Placements& gradient, bool partial_allowed) {
  Placements result = of;
  for (size_t axis = 0; axis < of.size(); ++axis) {
    if (of[axis].is_shard()) {
      continue;
    }
    const bool keep_partial = partial_allowed && of[axis].is_replicate() &&
        gradient[axis].is_partial(ReduceOp::kSum);
    result[axis] = keep_partial ? gradient[axis] : Placement(Replicate{});
  }
  return result;
}

struct ToLocal : public Function<ToLocal> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& tensor,
      int64_t gradient_spec) {
    context->saved_data["gradient"] = gradient_spec;
    return untracked_alias(local_of(tensor));
  }
  static variable_list backward(
      AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const SpecPtr spec = kept(context, "gradient");
    const SpecPtr typed = intern(
        spec->mesh,
        spec->placements,
        spec->sizes,
        spec->strides,
        gradients[0].scalar_type());
    return {
        from_local_function(match_layout(gradients[0], typed), typed),
        at::Tensor()};
  }
};

struct FromLocal : public Function<FromLocal> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& local, int64_t spec_address) {
    context->saved_data["spec"] = spec_address;
    const SpecPtr spec = kept(context, "spec");
    return wrap_local(untracked_alias(match_layout(local, spec)), spec);
  }
  static variable_list backward(
      AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const SpecPtr spec = kept(context, "spec");
    AskerScope asker("from_local.backward");
    const SpecPtr from = spec_or_replicated(gradients[0], spec->mesh);
    const Placements placements =
        gradient_placements(spec->placements, from->placements, false);
    if (at::GradMode::is_enabled() && is_dtensor(gradients[0])) {
      return {to_local(redistribute(gradients[0], placements)), at::Tensor()};
    }
    return {moved(gradients[0], from, placements, false), at::Tensor()};
  }
};

struct Redistribute : public Function<Redistribute> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& tensor, int64_t to_address) {
    context->saved_data["to"] = to_address;
    context->saved_data["from"] = keep(spec_of(tensor));
    AskerScope asker(
        AskerScope::current()[0] == '\0' ? "redistribute"
                                         : AskerScope::current());
    return moved_dtensor(
        tensor, spec_of(tensor), kept(context, "to")->placements);
  }
  static variable_list backward(
      AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) {
      return {at::Tensor(), at::Tensor()};
    }
    const SpecPtr input = kept(context, "from");
    AskerScope asker("redistribute.backward");
    const SpecPtr from = spec_or_replicated(gradients[0], input->mesh);
    const Placements placements =
        gradient_placements(input->placements, from->placements, true);
    if (at::GradMode::is_enabled() && is_dtensor(gradients[0])) {
      return {redistribute(gradients[0], placements), at::Tensor()};
    }
    return {moved_dtensor(gradients[0], from, placements), at::Tensor()};
  }
};

struct Distribute : public Function<Distribute> {
  static at::Tensor forward(
      AutogradContext* /*context*/,
      const at::Tensor& /*value*/,
      const at::Tensor& whole,
      int64_t to_address) {
    const SpecPtr to = spec_at(to_address);
    const SpecPtr from = with_placements(to, replicated(to->mesh));
    return wrap_local(
        match_layout(
            run_steps(whole, plan_redistribution(from, to, CostModel())), to),
        to);
  }
  static variable_list backward(
      AutogradContext* /*context*/, variable_list gradients) {
    const at::Tensor& gradient = gradients[0];
    const at::Tensor whole = gradient.defined() && is_dtensor(gradient)
        ? full_tensor(gradient)
        : gradient;
    return {whole, at::Tensor(), at::Tensor()};
  }
};

// Brings a leaf's incoming gradient to the leaf's placements. Lives in the
// leaf's autograd metadata, so the leaf outlives it.
class GradientPlacementHook : public torch::autograd::FunctionPreHook {
 public:
  explicit GradientPlacementHook(DTensorImpl* leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& gradients) override {
    variable_list result = gradients;
    const SpecPtr spec = leaf_->spec();
    if (!result[0].defined()) {
      return result;
    }
    AskerScope asker("backward.leaf");
    const SpecPtr from = spec_or_replicated(result[0], spec->mesh);
    const Placements placements =
        gradient_placements(spec->placements, from->placements, true);
    if (is_dtensor(result[0]) && placements == from->placements) {
      return result;
    }
    const bool differentiable =
        at::GradMode::is_enabled() && is_dtensor(result[0]);
    result[0] = differentiable ? redistribute(result[0], placements)
                               : moved_dtensor(result[0], from, placements);
    return result;
  }

 private:
  DTensorImpl* leaf_;
};

// What does not come out of a graph may become a leaf.
at::Tensor with_leaf_hook(at::Tensor tensor) {
  if (!tensor.requires_grad() && !tensor.is_inference()) {
    prepare_leaf(tensor);
  }
  return tensor;
}

} // namespace

void prepare_leaf(const at::Tensor& tensor) {
  DTensorImpl::get(tensor)->explain_missing_storage();
  torch::autograd::impl::add_hook(
      tensor,
      std::make_unique<GradientPlacementHook>(DTensorImpl::get(tensor)));
}

at::Tensor to_local_function(const at::Tensor& tensor, SpecPtr gradient) {
  return ToLocal::apply(tensor, keep(gradient).toInt());
}

at::Tensor from_local_function(const at::Tensor& local, SpecPtr spec) {
  return with_leaf_hook(FromLocal::apply(local, keep(spec).toInt()));
}

at::Tensor redistribute_function(const at::Tensor& tensor, SpecPtr to) {
  return with_leaf_hook(Redistribute::apply(tensor, keep(to).toInt()));
}

at::Tensor distribute_function(
    const at::Tensor& value, const at::Tensor& whole, SpecPtr to) {
  return with_leaf_hook(Distribute::apply(value, whole, keep(to).toInt()));
}

} // namespace tessera
