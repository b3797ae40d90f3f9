// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/sharding/simulation.h>
#include <tessera/sharding/simulation_kernels.h>
#include <tessera/sharding/simulation_ranks.h>

#include <algorithm>

namespace tessera::simulation {
namespace {

c10::OperatorHandle find(const std::string& op) {
  const size_t dot = op.find('.');
  const std::string overload =
      dot == std::string::npos ? "" : op.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      op.substr(0, dot).c_str(), overload.c_str());
}

Stack full_stack(const PlainCall& call) {
  Stack stack = call.args;
  const auto& arguments = find(call.op).schema().arguments();
  for (size_t i = stack.size(); i < arguments.size(); ++i) {
    const auto& value = arguments[i].default_value();
    stack.push_back(value ? *value : c10::IValue());
  }
  return stack;
}

bool is_kind(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.real_type();
  if (type->kind() == c10::TypeKind::OptionalType) {
    return type->castRaw<c10::OptionalType>()->getElementType()->kind() == kind;
  }
  return type->kind() == kind;
}

bool holds_tensors(const c10::Argument& argument) {
  const auto list = argument.type()->cast<c10::ListType>();
  return list != nullptr &&
      (list->getElementType()->kind() == c10::TypeKind::TensorType ||
       list->getElementType()->kind() == c10::TypeKind::OptionalType);
}

// Calls `visit` with every tensor slot of the stack, in order.
template <typename Visit>
void visit_tensors(const PlainCall& call, Stack& stack, Visit&& visit) {
  const auto& arguments = find(call.op).schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    const bool written = arguments[i].alias_info() != nullptr &&
        arguments[i].alias_info()->isWrite();
    if (is_kind(arguments[i], c10::TypeKind::TensorType)) {
      at::Tensor tensor =
          stack[i].isTensor() ? stack[i].toTensor() : at::Tensor();
      visit(tensor, written);
      stack[i] = tensor.defined() ? c10::IValue(tensor) : c10::IValue();
    } else if (holds_tensors(arguments[i])) {
      c10::List<at::Tensor> list = stack[i].toTensorList();
      c10::List<at::Tensor> out;
      for (const at::Tensor& element : list) {
        at::Tensor tensor = element;
        visit(tensor, written);
        out.push_back(tensor);
      }
      stack[i] = out;
    }
  }
}

OpArg scalar_arg(const c10::IValue& value, bool decides) {
  OpArg arg;
  arg.kind = OpArg::Kind::kReal;
  arg.known = decides;
  arg.real = decides ? value.toScalar().toDouble() : 0;
  return arg;
}

OpArg plain_arg(
    const c10::Argument& argument, const c10::IValue& value, bool decides) {
  OpArg arg;
  if (value.isNone()) {
    return arg;
  }
  if (is_kind(argument, c10::TypeKind::ScalarTypeType) ||
      is_kind(argument, c10::TypeKind::MemoryFormatType) ||
      is_kind(argument, c10::TypeKind::LayoutType)) {
    arg.kind = OpArg::Kind::kDtype;
    arg.integer = value.toInt();
  } else if (is_kind(argument, c10::TypeKind::NumberType) || value.isDouble()) {
    return scalar_arg(value, decides);
  } else if (value.isBool()) {
    arg.kind = OpArg::Kind::kBool;
    arg.integer = value.toBool() ? 1 : 0;
  } else if (value.isInt()) {
    arg.kind = OpArg::Kind::kInt;
    arg.integer = value.toInt();
  } else if (value.isIntList()) {
    arg.kind = OpArg::Kind::kIntList;
    arg.ints = value.toIntVector();
  } else if (value.isBoolList()) {
    arg.kind = OpArg::Kind::kBoolList;
    for (const bool flag : value.toBoolList()) {
      arg.ints.push_back(flag ? 1 : 0);
    }
  } else if (value.isString()) {
    arg.kind = OpArg::Kind::kString;
    arg.text = value.toStringRef();
  } else {
    arg.kind = OpArg::Kind::kOpaque;
  }
  return arg;
}

void flatten(const c10::IValue& value, Locals& out) {
  if (value.isTensor()) {
    out.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      out.push_back(tensor);
    }
  }
}

Locals results_of(const Stack& stack) {
  Locals out;
  for (const c10::IValue& value : stack) {
    flatten(value, out);
  }
  return out;
}

void edit(Stack& stack, const Decision& decision) {
  for (const ArgEdit& change : decision.edits) {
    auto& slot = stack[static_cast<size_t>(change.arg)];
    slot = change.scalar ? c10::IValue(change.ints.at(0))
                         : c10::IValue(change.ints);
  }
}

Locals run_op(const PlainCall& call, Stack stack) {
  find(call.op).callBoxed(stack);
  return results_of(stack);
}

Locals zeros_of(const std::vector<SpecPtr>& specs) {
  Locals out;
  for (const SpecPtr spec : specs) {
    out.push_back(
        spec == nullptr ? at::Tensor()
                        : at::zeros(spec->local_sizes, spec->dtype));
  }
  return out;
}

Locals run_local(
    const PlainCall& call,
    Stack& stack,
    const Decision& decision,
    const std::vector<SpecPtr>& outputs) {
  edit(stack, decision);
  switch (decision.kernel) {
    case LocalKernel::kMean:
      return {global_mean(decision.numbers, stack)};
    case LocalKernel::kDivide: {
      Locals out = run_op(call, stack);
      return {out[0] / decision.numbers.at(0)};
    }
    case LocalKernel::kView:
      return {stack[0].toTensor().view(outputs[0]->local_sizes)};
    case LocalKernel::kMaximum:
    case LocalKernel::kMinimum:
      return {extremum(
          decision.kernel == LocalKernel::kMaximum,
          decision.numbers.at(0),
          stack)};
    case LocalKernel::kZerosIfEmpty:
      return stack[0].toTensor().numel() > 0 ? run_op(call, stack)
                                             : zeros_of(outputs);
    case LocalKernel::kNorm:
      return powers(decision.numbers.at(0), stack);
    default:
      return run_op(call, stack);
  }
}

Locals finish(const Decision& decision, const Stack& stack, Locals values) {
  if (decision.kernel == LocalKernel::kNorm) {
    for (at::Tensor& value : values) {
      value = root(decision.numbers.at(0), stack, value);
    }
  } else if (decision.kernel == LocalKernel::kNllLoss) {
    values[0] = values[0] / values[1];
  }
  return values;
}

// Decisions of all ranks; failures where they differ.
std::vector<Decision> decide(
    const PlainCall& call,
    const std::vector<DeviceMesh>& meshes,
    const std::vector<Placements>& placements) {
  std::vector<Decision> decisions;
  for (const DeviceMesh& mesh : meshes) {
    decisions.push_back(propagate(seen(call, mesh, placements), CostModel()));
    EXPECT_EQ(text(decisions.back().inputs), text(decisions[0].inputs));
    EXPECT_EQ(text(decisions.back().written), text(decisions[0].written));
    EXPECT_EQ(raw_text(decisions.back()), raw_text(decisions[0]));
  }
  return decisions;
}

void check_shape(const OutputDecision& output, const at::Tensor& expected) {
  if (!output.sizes_known) {
    return;
  }
  ASSERT_EQ(output.sizes, expected.sizes().vec());
  const auto strides = output.strides.empty()
      ? at::empty(output.sizes).strides().vec()
      : output.strides;
  for (int64_t d = 0; d < expected.dim() && expected.numel() > 0; ++d) {
    if (expected.size(d) > 1) {
      EXPECT_EQ(strides[static_cast<size_t>(d)], expected.stride(d))
          << "stride of dim " << d << " of " << expected.sizes();
    }
  }
}

std::vector<SpecPtr> output_specs(
    const DeviceMesh& mesh, const Decision& decision, const Locals& expected) {
  std::vector<SpecPtr> specs;
  for (size_t r = 0; r < decision.outputs.size() && r < expected.size(); ++r) {
    const bool defined = expected[r].defined();
    specs.push_back(
        defined ? intern_contiguous(
                      mesh,
                      decision.outputs[r].placements,
                      expected[r].sizes(),
                      expected[r].scalar_type())
                : nullptr);
  }
  return specs;
}

Locals tensors_of(const PlainCall& call, Stack& stack) {
  Locals all;
  visit_tensors(call, stack, [&](at::Tensor& tensor, bool /*written*/) {
    all.push_back(tensor);
  });
  return all;
}

} // namespace

size_t tensor_count(const PlainCall& call) {
  Stack stack = full_stack(call);
  return tensors_of(call, stack).size();
}

std::string text(const std::vector<SpecPtr>& specs) {
  std::string out;
  for (SpecPtr spec : specs) {
    out += (out.empty() ? "" : ", ") +
        (spec == nullptr ? std::string("-") : str(spec->placements));
  }
  return out;
}

std::string raw_text(const Decision& decision) {
  std::string out;
  for (const OutputDecision& output : decision.outputs) {
    out += (out.empty() ? "" : ", ") + str(output.raw);
  }
  return out;
}

OpCall seen(
    const PlainCall& call,
    const DeviceMesh& mesh,
    const std::vector<Placements>& placements) {
  Stack stack = full_stack(call);
  const auto& arguments = find(call.op).schema().arguments();
  const auto deciding = deciding_args(call.op);
  OpCall out;
  out.op = call.op;
  out.mesh = mesh;
  for (size_t i = 0; i < stack.size(); ++i) {
    const bool decides =
        std::find(deciding.begin(), deciding.end(), static_cast<int64_t>(i)) !=
        deciding.end();
    OpArg arg;
    if (is_kind(arguments[i], c10::TypeKind::TensorType)) {
      arg.kind = OpArg::Kind::kTensor;
    } else if (holds_tensors(arguments[i])) {
      arg.kind = OpArg::Kind::kTensorList;
      arg.tensors.resize(stack[i].toTensorList().size());
    } else {
      arg = plain_arg(arguments[i], stack[i], decides);
    }
    arg.written = arguments[i].alias_info() != nullptr &&
        arguments[i].alias_info()->isWrite();
    out.args.push_back(arg);
  }
  std::vector<SpecPtr> specs;
  for (const at::Tensor& tensor : tensors_of(call, stack)) {
    specs.push_back(
        tensor.defined() ? intern(
                               mesh,
                               placements.at(specs.size()),
                               tensor.sizes(),
                               tensor.strides(),
                               tensor.scalar_type())
                         : nullptr);
  }
  size_t next = 0;
  for (OpArg& arg : out.args) {
    if (arg.kind == OpArg::Kind::kTensor) {
      arg.tensor = specs[next++];
    }
    for (SpecPtr& element : arg.tensors) {
      element = specs[next++];
    }
  }
  return out;
}

namespace {

// The plain call's results, and its tensors afterwards.
struct Plain {
  Locals results;
  Locals tensors;
};

Plain run_plain(const PlainCall& call, Stack stack) {
  visit_tensors(call, stack, [](at::Tensor& tensor, bool written) {
    tensor = written && tensor.defined() ? tensor.clone() : tensor;
  });
  const Locals tensors = tensors_of(call, stack);
  return {run_op(call, std::move(stack)), tensors};
}

// What every rank holds of each tensor as the decision wants it; empty for
// absent ones.
std::vector<Locals> cut_inputs(
    const DeviceMesh& mesh, const Decision& decision, const Locals& tensors) {
  std::vector<Locals> pieces(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined()) {
      pieces[i] = cut(mesh, decision.inputs.at(i)->placements, tensors[i]);
    }
  }
  return pieces;
}

Locals run_rank(
    const PlainCall& call,
    const DeviceMesh& mesh,
    const Decision& decision,
    const std::vector<Locals>& pieces,
    size_t rank,
    const Locals& expected) {
  Stack local = full_stack(call);
  size_t next = 0;
  visit_tensors(call, local, [&](at::Tensor& tensor, bool /*written*/) {
    tensor = pieces[next].empty() ? at::Tensor() : pieces[next][rank];
    ++next;
  });
  return run_local(
      call, local, decision, output_specs(mesh, decision, expected));
}

void check_results(
    const DeviceMesh& mesh,
    const Decision& decision,
    const Stack& stack,
    const std::vector<Locals>& by_rank,
    const Locals& expected) {
  Locals values;
  for (size_t r = 0; r < decision.outputs.size(); ++r) {
    Locals parts;
    for (const Locals& results : by_rank) {
      parts.push_back(results.at(r));
    }
    values.push_back(
        parts[0].defined() ? assemble(mesh, decision.outputs[r].raw, parts)
                           : at::Tensor());
  }
  values = finish(decision, stack, values);
  for (size_t r = 0; r < values.size(); ++r) {
    if (values[r].defined()) {
      EXPECT_TRUE(same(values[r], expected[r])) << "result " << r << ": got\n"
                                                << values[r] << "\nexpected\n"
                                                << expected[r];
      check_shape(decision.outputs[r], expected[r]);
    }
  }
}

void check_written(
    const DeviceMesh& mesh,
    const Decision& decision,
    const std::vector<Locals>& pieces,
    const Locals& expected) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].empty() && decision.written.at(i) != nullptr) {
      const at::Tensor value =
          assemble(mesh, decision.written[i]->placements, pieces[i]);
      EXPECT_TRUE(same(value, expected[i])) << "argument " << i << ": got\n"
                                            << value << "\nexpected\n"
                                            << expected[i];
    }
  }
}

} // namespace

Decision check(
    const PlainCall& call,
    const std::vector<Axis>& axes,
    const std::vector<Placements>& placements) {
  std::vector<DeviceMesh> meshes;
  const int64_t ranks = describe_mesh(axes).size();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    meshes.push_back(describe_mesh(axes, rank));
  }
  const auto decisions = decide(call, meshes, placements);
  const Decision& first = decisions[0];
  SCOPED_TRACE(
      call.op + " of " + text(first.inputs) + " -> " + raw_text(first));
  Stack stack = full_stack(call);
  const Plain plain = run_plain(call, stack);
  const auto pieces = cut_inputs(meshes[0], first, tensors_of(call, stack));
  std::vector<Locals> by_rank;
  for (size_t rank = 0; rank < meshes.size(); ++rank) {
    by_rank.push_back(run_rank(
        call, meshes[rank], decisions[rank], pieces, rank, plain.results));
  }
  check_results(meshes[0], first, stack, by_rank, plain.results);
  check_written(meshes[0], first, pieces, plain.tensors);
  return first;
}

} // namespace tessera::simulation
