// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/exec_plan.h>

#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/call_key.h>
#include <tessera/dtensor/layout.h>
#include <tessera/sharding/propagate.h>

#include <algorithm>

namespace tessera {
namespace {

using Kind = OpInfo::ArgKind;

// A plain tensor counts as replicated, and so does one that is replicated on
// another mesh.
SpecPtr spec_in_call(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!tensor.defined()) {
    return nullptr;
  }
  DTensorImpl* impl = DTensorImpl::get(tensor);
  if (impl != nullptr && impl->spec()->mesh == mesh) {
    return impl->spec();
  }
  return intern(
      mesh,
      replicated(mesh),
      tensor.sizes(),
      tensor.strides(),
      tensor.scalar_type());
}

OpArg list_argument(
    const c10::IValue& value, Kind kind, const DeviceMesh& mesh) {
  OpArg result;
  const bool tensors =
      kind == Kind::kTensorList || kind == Kind::kOptionalTensorList;
  result.kind = tensors         ? OpArg::Kind::kTensorList
      : kind == Kind::kBoolList ? OpArg::Kind::kBoolList
                                : OpArg::Kind::kIntList;
  for (const c10::IValue& item : value.toListRef()) {
    if (tensors) {
      result.tensors.push_back(
          item.isNone() ? nullptr : spec_in_call(item.toTensor(), mesh));
    } else {
      result.ints.push_back(
          item.isBool()      ? static_cast<int64_t>(item.toBool())
              : item.isInt() ? item.toInt()
                             : item.toSymInt().expect_int());
    }
  }
  return result;
}

OpArg number_argument(const c10::IValue& value, const OpInfo::Arg& arg) {
  OpArg result;
  switch (arg.kind) {
    case Kind::kInt:
    case Kind::kDtype:
      result.kind =
          arg.kind == Kind::kInt ? OpArg::Kind::kInt : OpArg::Kind::kDtype;
      result.integer =
          value.isInt() ? value.toInt() : value.toSymInt().expect_int();
      break;
    case Kind::kBool:
      result.kind = OpArg::Kind::kBool;
      result.integer = value.toBool() ? 1 : 0;
      break;
    case Kind::kReal:
    case Kind::kScalar:
      result.kind = OpArg::Kind::kReal;
      result.known = arg.deciding;
      result.real = arg.deciding && !value.isComplexDouble()
          ? value.toScalar().toDouble()
          : 0;
      break;
    case Kind::kString:
      result.kind = OpArg::Kind::kString;
      result.text = value.toStringRef();
      break;
    default:
      result.kind = OpArg::Kind::kOpaque;
  }
  return result;
}

bool is_tensor_list(Kind kind) {
  return kind == Kind::kTensorList || kind == Kind::kOptionalTensorList;
}

OpArg argument(
    const c10::IValue& value, const OpInfo::Arg& arg, const DeviceMesh& mesh) {
  OpArg result;
  if (arg.kind == Kind::kTensor) {
    result.kind = OpArg::Kind::kTensor;
    result.tensor =
        value.isTensor() ? spec_in_call(value.toTensor(), mesh) : nullptr;
  } else if (value.isList() && arg.kind != Kind::kOpaque) {
    result = list_argument(value, arg.kind, mesh);
  } else if (is_tensor_list(arg.kind)) {
    result.kind = OpArg::Kind::kTensorList;
  } else if (!value.isNone() && !value.isList()) {
    result = number_argument(value, arg);
  }
  result.written = arg.written;
  return result;
}

// The tensors of a call, flattened in schema order as Decision::inputs counts
// them.
struct FlatTensor {
  int arg;
  int element;
  SpecPtr spec;
  bool plain;
  bool written;
};

std::vector<FlatTensor> flatten(
    const OpInfo& info, const OpCall& call, const torch::jit::Stack& stack) {
  std::vector<FlatTensor> flat;
  const c10::IValue* values = stack.data() + (stack.size() - info.args.size());
  for (int position : info.tensor_args) {
    const c10::IValue& value = values[position];
    const OpArg& arg = call.args[static_cast<size_t>(position)];
    if (is_tensor_list(info.args[static_cast<size_t>(position)].kind)) {
      const c10::ArrayRef<c10::IValue> items =
          value.isNone() ? c10::ArrayRef<c10::IValue>() : value.toListRef();
      for (size_t i = 0; i < items.size(); ++i) {
        const bool plain = items[i].isTensor() &&
            items[i].toTensor().defined() &&
            DTensorImpl::get(items[i].toTensor()) == nullptr;
        flat.push_back(
            {position,
             static_cast<int>(i),
             arg.tensors[i],
             plain,
             arg.written});
      }
    } else {
      const bool plain = value.isTensor() && value.toTensor().defined() &&
          DTensorImpl::get(value.toTensor()) == nullptr;
      flat.push_back({position, -1, arg.tensor, plain, arg.written});
    }
  }
  return flat;
}

void refuse_plain_destinations(
    const OpInfo& info, const std::vector<FlatTensor>& flat) {
  for (const FlatTensor& tensor : flat) {
    if (tensor.plain && tensor.written) {
      throw UsageError(fmt::format(
          "{}: writes a distributed tensor into a plain one of shape [{}]; "
          "make the destination distributed, or take full_tensor or to_local "
          "of "
          "the source first",
          info.name,
          fmt::join(tensor.spec->sizes, ", ")));
    }
  }
}

void plan_moves(
    ExecPlan& plan,
    const std::vector<FlatTensor>& flat,
    const CostModel& costs) {
  const Decision& decision = plan.decision;
  size_t written_count = 0;
  for (size_t i = 0; i < flat.size(); ++i) {
    const FlatTensor& tensor = flat[i];
    const size_t written_index = written_count;
    written_count += tensor.written ? 1 : 0;
    const SpecPtr target =
        i < decision.inputs.size() ? decision.inputs[i] : nullptr;
    if (tensor.spec == nullptr || target == nullptr) {
      continue;
    }
    const bool moves = target != tensor.spec;
    if (moves) {
      plan.moves.push_back(
          {tensor.arg,
           tensor.element,
           plan_redistribution(tensor.spec, target, costs),
           target});
    }
    if (tensor.written) {
      const SpecPtr after =
          i < decision.written.size() && decision.written[i] != nullptr
          ? decision.written[i]
          : target;
      if (moves || after != tensor.spec) {
        plan.returns.push_back(
            {tensor.arg,
             tensor.element,
             plan_redistribution(after, tensor.spec, costs),
             written_index});
      }
    }
  }
}

void prepare_edits(ExecPlan& plan) {
  for (const ArgEdit& edit : plan.decision.edits) {
    if (edit.scalar) {
      plan.edits.emplace_back(
          static_cast<int>(edit.arg), c10::IValue(edit.ints.at(0)));
    } else {
      plan.edits.emplace_back(
          static_cast<int>(edit.arg), c10::IValue(c10::IntArrayRef(edit.ints)));
    }
  }
}

// Whether this rank's part of the first operand has no element.
bool holds_nothing(const ExecPlan& plan) {
  const std::vector<SpecPtr>& inputs = plan.decision.inputs;
  if (inputs.empty() || inputs[0] == nullptr) {
    return false;
  }
  const std::vector<int64_t>& sizes = inputs[0]->local_sizes;
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

bool moves_data(const ExecPlan& plan) {
  for (const ExecPlan::Move& move : plan.moves) {
    for (const RedistributionStep& step : move.steps) {
      if (step.kind != RedistributionStep::Kind::kRelabel) {
        return true;
      }
    }
  }
  return false;
}

SpecPtr output_spec(
    const DeviceMesh& mesh,
    const Placements& placements,
    const OutputDecision& output,
    c10::ScalarType dtype) {
  return output.strides.empty()
      ? intern_contiguous(mesh, placements, output.sizes, dtype)
      : intern(mesh, placements, output.sizes, output.strides, dtype);
}

} // namespace

std::unique_ptr<ExecPlan> make_plan(
    const OpInfo& info, const torch::jit::Stack& stack) {
  auto plan = std::make_unique<ExecPlan>();
  plan->mesh = mesh_of_call(info, stack);
  OpCall call;
  call.op = info.name;
  call.mesh = plan->mesh;
  const c10::IValue* values = stack.data() + (stack.size() - info.args.size());
  for (size_t i = 0; i < info.args.size(); ++i) {
    call.args.push_back(argument(values[i], info.args[i], plan->mesh));
  }
  const std::vector<FlatTensor> flat = flatten(info, call, stack);
  refuse_plain_destinations(info, flat);
  const CostModel costs;
  plan->decision = propagate(call, costs);
  plan_moves(*plan, flat, costs);
  prepare_edits(*plan);
  if (plan->decision.kernel == LocalKernel::kView) {
    const OutputDecision& output = plan->decision.outputs.at(0);
    plan->view_sizes =
        intern_contiguous(plan->mesh, output.raw, output.sizes, c10::kFloat)
            ->local_sizes;
  }
  if (plan->decision.kernel == LocalKernel::kZerosIfEmpty &&
      !holds_nothing(*plan)) {
    plan->decision.kernel = LocalKernel::kOp;
  }
  plan->copied_view = info.is_view && moves_data(*plan);
  return plan;
}

void learn_outputs(
    ExecPlan& plan,
    const std::vector<at::Tensor>& local_results,
    bool are_views) {
  const Decision& decision = plan.decision;
  const CostModel costs;
  plan.outputs.resize(local_results.size());
  bool finished = true; // the local results are the results
  for (size_t i = 0; i < local_results.size(); ++i) {
    ExecPlan::Output& output = plan.outputs[i];
    const bool known =
        i < decision.outputs.size() && decision.outputs[i].sizes_known;
    if (i < decision.outputs.size() && !known) {
      output.sizes = decision.outputs[i].sizes;
    }
    output.placements = i < decision.outputs.size()
        ? decision.outputs[i].placements
        : replicated(plan.mesh);
    if (!known || !local_results[i].defined()) {
      continue;
    }
    const c10::ScalarType dtype = local_results[i].scalar_type();
    const SpecPtr spec =
        output_spec(plan.mesh, output.placements, decision.outputs[i], dtype);
    const SpecPtr raw = output_spec(
        plan.mesh, decision.outputs[i].raw, decision.outputs[i], dtype);
    output.prototype = DTensorPrototype::of(spec);
    output.steps = plan_redistribution(raw, spec, costs);
    output.relayout = !are_views && !layout_matches(local_results[i], spec) &&
        output.steps.empty();
    finished = finished && output.steps.empty() && !output.relayout;
  }
  plan.simple = finished && plan.moves.empty() && plan.returns.empty() &&
      decision.kernel == LocalKernel::kOp && !decision.fallback;
  plan.outputs_ready = true;
}

} // namespace tessera
