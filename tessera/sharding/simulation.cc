// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/sharding/simulation.h>

#include <cmath>
#include <limits>

namespace tessera::simulation {
namespace {

using Stack = std::vector<c10::IValue>;
using Locals = std::vector<at::Tensor>; // of all ranks, row-major

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

// Contributions of n ranks that reduce to the value.
Locals contributions(const at::Tensor& value, ReduceOp op, int64_t n) {
  Locals parts;
  at::Tensor rest = op == ReduceOp::kAvg ? value * n : value.clone();
  for (int64_t i = 1; i < n; ++i) {
    at::Tensor part = value.clone();
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) {
      part = torch::randint(-3, 4, value.sizes()).to(value.scalar_type());
      rest = rest - part;
    } else if (op == ReduceOp::kProduct) {
      part.fill_(2);
      rest = rest / 2;
    }
    parts.push_back(part);
  }
  parts.push_back(rest);
  return parts;
}

// What each rank holds of a value.
Locals cut(
    const DeviceMesh& mesh,
    const Placements& placements,
    const at::Tensor& value,
    int64_t axis = 0) {
  if (axis == mesh.ndim()) {
    return {value.clone()};
  }
  const Placement& placement = placements[static_cast<size_t>(axis)];
  const int64_t n = mesh.size(axis);
  Locals parts(static_cast<size_t>(n), value);
  if (placement.is_partial()) {
    parts = contributions(value, placement.op(), n);
  }
  Locals all;
  for (int64_t i = 0; i < n; ++i) {
    at::Tensor part = parts[static_cast<size_t>(i)];
    if (placement.is_shard()) {
      const Chunk range =
          chunk(part.size(placement.dim()), placement.unit(), n, i);
      part = part.narrow(placement.dim(), range.offset, range.size);
    }
    const Locals inner = cut(mesh, placements, part, axis + 1);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

at::Tensor combined(const Locals& parts, ReduceOp op) {
  const at::Tensor all = torch::stack(parts);
  switch (op) {
    case ReduceOp::kSum:
      return all.sum(0, false, all.scalar_type());
    case ReduceOp::kAvg:
      return all.mean(0);
    case ReduceOp::kMax:
      return all.amax(0);
    case ReduceOp::kMin:
      return all.amin(0);
    default:
      return all.prod(0, false, all.scalar_type());
  }
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  const double tolerance = a.scalar_type() == torch::kFloat ? 1e-5 : 1e-9;
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
      torch::allclose(
             a.to(torch::kDouble),
             b.to(torch::kDouble),
             tolerance,
             tolerance,
             /*equal_nan=*/true);
}

// The value that the ranks' tensors make up.
at::Tensor assemble(
    const DeviceMesh& mesh,
    const Placements& placements,
    const Locals& locals,
    int64_t axis = 0) {
  if (axis == mesh.ndim()) {
    return locals[0];
  }
  const int64_t n = mesh.size(axis);
  const auto stride = static_cast<int64_t>(locals.size()) / n;
  Locals parts;
  for (int64_t i = 0; i < n; ++i) {
    const auto begin = locals.begin() + i * stride;
    parts.push_back(
        assemble(mesh, placements, Locals(begin, begin + stride), axis + 1));
  }
  const Placement& placement = placements[static_cast<size_t>(axis)];
  if (placement.is_shard()) {
    return torch::cat(parts, placement.dim());
  }
  if (placement.is_partial()) {
    return combined(parts, placement.op());
  }
  for (const at::Tensor& part : parts) {
    EXPECT_TRUE(same(part, parts[0])) << "replicas differ:\n"
                                      << part << "\n"
                                      << parts[0];
  }
  return parts[0];
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

std::vector<int64_t> dims_arg(const c10::IValue& value, int64_t rank) {
  std::vector<int64_t> dims =
      value.isIntList() ? value.toIntVector() : std::vector<int64_t>();
  const bool all = dims.empty();
  for (int64_t d = 0; all && d < rank; ++d) {
    dims.push_back(d);
  }
  return dims;
}

// A reduction that a dims argument and keepdim at these positions rule; -1:
// over all.
template <typename Fn>
at::Tensor reduce(const Stack& stack, size_t dims, Fn&& fn) {
  const at::Tensor x = stack[0].toTensor();
  if (stack.size() <= dims + 1) {
    std::vector<int64_t> all;
    for (int64_t d = 0; d < x.dim(); ++d) {
      all.push_back(d);
    }
    return fn(x, all, false);
  }
  return fn(x, dims_arg(stack[dims], x.dim()), stack[dims + 1].toBool());
}

at::Tensor extremum(const std::string& op, const Stack& stack) {
  const bool largest = op.find("max") != std::string::npos ||
      op.find("any") != std::string::npos;
  return reduce(
      stack, 1, [&](const at::Tensor& x, std::vector<int64_t> dims, bool keep) {
        if (x.numel() == 0) {
          const double infinity = std::numeric_limits<double>::infinity();
          const at::Tensor shape = x.to(torch::kDouble).sum(dims, keep);
          const bool boolean = x.scalar_type() == torch::kBool;
          const double identity = boolean ? (largest ? 0 : 1)
              : largest                   ? -infinity
                                          : infinity;
          return torch::full_like(shape, identity).to(x.scalar_type());
        }
        return largest ? x.amax(dims, keep) : x.amin(dims, keep);
      });
}

at::Tensor powers(const std::string& op, const Stack& stack) {
  const double p = stack[1].isNone() ? 2 : stack[1].toScalar().toDouble();
  const size_t dims = op.find("_foreach") != std::string::npos ? 100 : 2;
  return reduce(
      stack,
      dims,
      [&](const at::Tensor& x, std::vector<int64_t> over, bool keep) {
        if (std::isinf(p)) {
          return extremum(
              p > 0 ? "max" : "min", {x.abs(), c10::IValue(over), keep});
        }
        return p == 0 ? (x != 0).to(x.scalar_type()).sum(over, keep)
                      : x.abs().pow(p).sum(over, keep);
      });
}

at::Tensor root(const Stack& stack, const at::Tensor& powers_sum) {
  const double p = stack[1].isNone() ? 2 : stack[1].toScalar().toDouble();
  return std::isinf(p) || p == 0 ? powers_sum : powers_sum.pow(1 / p);
}

Locals run_op(const PlainCall& call, Stack stack) {
  find(call.op).callBoxed(stack);
  return results_of(stack);
}

Locals run_mean(const Stack& stack, int64_t count) {
  return {reduce(
      stack, 1, [&](const at::Tensor& x, std::vector<int64_t> dims, bool keep) {
        return x.sum(dims, keep) / count;
      })};
}

Locals run_norms(const PlainCall& call, const Stack& stack) {
  if (!stack[0].isTensorList()) {
    return {powers(call.op, stack)};
  }
  Locals out;
  for (const at::Tensor& x : stack[0].toTensorVector()) {
    out.push_back(powers(call.op, {x, stack[1]}));
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
      return run_mean(stack, decision.numbers.at(0));
    case LocalKernel::kDivide: {
      Locals out = run_op(call, stack);
      return {out[0] / decision.numbers.at(0)};
    }
    case LocalKernel::kView:
      return {stack[0].toTensor().view(outputs[0]->local_sizes)};
    case LocalKernel::kExtremum:
      return {extremum(call.op, stack)};
    case LocalKernel::kNorm:
      return run_norms(call, stack);
    case LocalKernel::kNllLoss:
      stack[3] = 2;
      return run_op(call, stack);
    default:
      return run_op(call, stack);
  }
}

Locals finish(const Decision& decision, const Stack& stack, Locals values) {
  if (decision.kernel == LocalKernel::kNorm) {
    for (at::Tensor& value : values) {
      value = root(stack, value);
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

  // The plain call on copies, whose written arguments are looked at afterwards.
  Stack stack = full_stack(call);
  const Locals before = tensors_of(call, stack);
  visit_tensors(call, stack, [](at::Tensor& tensor, bool written) {
    tensor = written && tensor.defined() ? tensor.clone() : tensor;
  });
  const Locals plain_inputs = tensors_of(call, stack);
  const Locals expected = run_op(call, stack);

  // All ranks' inputs, then their local calls.
  std::vector<Locals> pieces(before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i].defined()) {
      pieces[i] = cut(meshes[0], first.inputs.at(i)->placements, before[i]);
    }
  }
  std::vector<Locals> outputs(decisions[0].outputs.size());
  for (size_t rank = 0; rank < meshes.size(); ++rank) {
    Stack local = full_stack(call);
    size_t next = 0;
    visit_tensors(call, local, [&](at::Tensor& tensor, bool /*written*/) {
      tensor = pieces[next].empty() ? at::Tensor() : pieces[next][rank];
      ++next;
    });
    const Locals results = run_local(
        call,
        local,
        decisions[rank],
        output_specs(meshes[rank], decisions[rank], expected));
    for (size_t r = 0; r < outputs.size(); ++r) {
      outputs[r].push_back(results.at(r));
    }
  }

  Locals values;
  for (size_t r = 0; r < outputs.size(); ++r) {
    values.push_back(
        outputs[r][0].defined()
            ? assemble(meshes[0], first.outputs[r].raw, outputs[r])
            : at::Tensor());
  }
  values = finish(first, stack, values);
  for (size_t r = 0; r < values.size(); ++r) {
    if (values[r].defined()) {
      EXPECT_TRUE(same(values[r], expected[r])) << "result " << r << ": got\n"
                                                << values[r] << "\nexpected\n"
                                                << expected[r];
      check_shape(first.outputs[r], expected[r]);
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i].defined() && first.written.at(i) != nullptr) {
      const at::Tensor value =
          assemble(meshes[0], first.written[i]->placements, pieces[i]);
      EXPECT_TRUE(same(value, plain_inputs[i])) << "argument " << i << ": got\n"
                                                << value << "\nexpected\n"
                                                << plain_inputs[i];
    }
  }
  return first;
}

} // namespace tessera::simulation
