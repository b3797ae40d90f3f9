// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/local_kernels.h>

#include <ATen/OpMathType.h>
#include <ATen/ops/full.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/random_kernels.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

c10::IValue& argument(
    torch::jit::Stack& stack, const OpInfo& info, size_t position) {
  return stack[stack.size() - info.args.size() + position];
}

void call_operator(const LocalCall& call, torch::jit::Stack& stack) {
  call.op.redispatchBoxed(call.keys, &stack);
}

// Puts a reduction's result where the arguments were; in the out= form it is
// written there.
void leave_result(
    const OpInfo& info, torch::jit::Stack& stack, at::Tensor result) {
  if (!info.written_args.empty()) {
    const at::Tensor out =
        argument(stack, info, static_cast<size_t>(info.written_args[0]))
            .toTensor();
    result = out.copy_(result);
  }
  torch::jit::drop(stack, info.args.size());
  stack.emplace_back(std::move(result));
}

// The arguments dims and keepdim of a reduction.
struct Reduced {
  std::vector<int64_t> dims; // empty: all
  bool keepdim = false;
};

// `position`: of dims, which keepdim follows; -1: the operator has neither.
Reduced reduced_of(
    const OpInfo& info, torch::jit::Stack& stack, int64_t position) {
  if (position < 0) {
    return {};
  }
  const auto first = static_cast<size_t>(position);
  const c10::IValue& dims = argument(stack, info, first);
  return {
      dims.isNone() ? std::vector<int64_t>{} : dims.toIntVector(),
      argument(stack, info, first + 1).toBool()};
}

// The sum that a mean over cut dims begins with.
void run_sum(const LocalCall& call, torch::jit::Stack& stack) {
  const OpInfo& info = call.info;
  const int64_t dims = call.plan.decision.numbers.at(1);
  const Reduced reduced = reduced_of(info, stack, dims);
  const auto dtype =
      argument(stack, info, static_cast<size_t>(dims < 0 ? 1 : dims + 2))
          .toOptional<at::ScalarType>();
  leave_result(
      info,
      stack,
      at::sum(
          argument(stack, info, 0).toTensor(),
          reduced.dims,
          reduced.keepdim,
          dtype));
}

void divide(const LocalCall& call, torch::jit::Stack& stack) {
  at::Tensor result = stack.back().toTensor();
  result.div_(static_cast<double>(call.plan.decision.numbers.at(0)));
}

void run_view(const LocalCall& call, torch::jit::Stack& stack) {
  at::Tensor result =
      argument(stack, call.info, 0).toTensor().view(call.plan.view_sizes);
  torch::jit::drop(stack, call.info.args.size());
  stack.emplace_back(std::move(result));
}

// The value that changes no reduction by max (or min).
at::Scalar identity(at::ScalarType dtype, bool of_max) {
  if (dtype == at::kBool) {
    return !of_max;
  }
  if (at::isFloatingType(dtype)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return of_max ? -infinity : infinity;
  }
  switch (dtype) {
    case at::kByte:
      return of_max ? 0 : std::numeric_limits<uint8_t>::max();
    case at::kChar:
      return of_max ? std::numeric_limits<int8_t>::min()
                    : std::numeric_limits<int8_t>::max();
    case at::kShort:
      return of_max ? std::numeric_limits<int16_t>::min()
                    : std::numeric_limits<int16_t>::max();
    case at::kInt:
      return of_max ? std::numeric_limits<int32_t>::min()
                    : std::numeric_limits<int32_t>::max();
    default:
      return of_max ? std::numeric_limits<int64_t>::min()
                    : std::numeric_limits<int64_t>::max();
  }
}

std::vector<int64_t> reduced_sizes(
    c10::IntArrayRef sizes, const std::vector<int64_t>& dims, bool keepdim) {
  std::vector<bool> reduced(sizes.size(), dims.empty());
  for (int64_t dim : dims) {
    reduced[static_cast<size_t>(
        dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim)] = true;
  }
  std::vector<int64_t> result;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!reduced[d]) {
      result.push_back(sizes[d]);
    } else if (keepdim) {
      result.push_back(1);
    }
  }
  return result;
}

// A reduction by max or min of a local tensor that may be empty.
void run_extremum(
    const LocalCall& call, torch::jit::Stack& stack, bool of_max) {
  const OpInfo& info = call.info;
  const at::Tensor self = argument(stack, info, 0).toTensor();
  if (self.numel() != 0) {
    call_operator(call, stack);
    return;
  }
  const Reduced reduced =
      reduced_of(info, stack, call.plan.decision.numbers.at(0));
  const std::vector<int64_t> sizes =
      reduced_sizes(self.sizes(), reduced.dims, reduced.keepdim);
  leave_result(
      info,
      stack,
      at::full(sizes, identity(self.scalar_type(), of_max), self.options()));
}

bool any_empty(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().numel() == 0;
  }
  for (const at::Tensor& tensor : value.toTensorVector()) {
    if (tensor.numel() == 0) {
      return true;
    }
  }
  return false;
}

bool has_root(double order) {
  return std::isfinite(order) && order != 0 && order != 1;
}

at::Tensor raw_norm(const at::Tensor& norm, double order) {
  if (!has_root(order)) {
    return norm;
  }
  return order == 2 ? norm.mul(norm) : at::pow(norm, order);
}

// What an empty local contributes to a norm of infinite order: the operator
// itself refuses it, so a norm of order 2 gives the shape, and zeros.
at::Tensor norm_of_part(
    const LocalCall& call,
    torch::jit::Stack arguments,
    size_t order_position,
    double order) {
  const bool refused = std::isinf(order) && any_empty(arguments[0]);
  if (refused) {
    arguments[order_position] = 2.0;
  }
  call.op.redispatchBoxed(call.keys, &arguments);
  at::Tensor norm = arguments.back().isTensorList()
      ? arguments.back().toTensorVector().at(0)
      : arguments.back().toTensor();
  return refused && order < 0 ? norm.fill_(-order) : norm;
}

// Norms of the locals, raised to their order so that they add up.
void run_norm(LocalCall& call, torch::jit::Stack& stack) {
  const auto position = static_cast<size_t>(call.plan.decision.numbers.at(0));
  const c10::IValue& p = argument(stack, call.info, position);
  const double order = p.isNone() ? 2.0 : p.toScalar().toDouble();
  call.norm_order = order;
  torch::jit::Stack arguments(
      stack.end() - static_cast<std::ptrdiff_t>(call.info.args.size()),
      stack.end());
  torch::jit::drop(stack, call.info.args.size());
  if (arguments[0].isTensor()) {
    stack.emplace_back(
        raw_norm(norm_of_part(call, arguments, position, order), order));
    return;
  }
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : arguments[0].toTensorVector()) {
    torch::jit::Stack one = arguments;
    one[0] = std::vector<at::Tensor>{tensor};
    norms.push_back(raw_norm(norm_of_part(call, one, position, order), order));
  }
  stack.emplace_back(std::move(norms));
}

// Which attention the composite picks: 0 is the composed one, 1 the fused CPU
// kernel. Decided on the global call alone.
void run_sdp_choice(const LocalCall& call, torch::jit::Stack& stack) {
  const OpInfo& info = call.info;
  const at::Tensor query = argument(stack, info, 0).toTensor();
  const double dropout = argument(stack, info, 4).toDouble();
  const bool fused = query.dim() == 4 && dropout == 0 &&
      at::isFloatingType(query.scalar_type());
  torch::jit::drop(stack, info.args.size());
  stack.emplace_back(static_cast<int64_t>(fused ? 1 : 0));
}

// The results of attention whose query (or gradient) has no element here. The
// sums that its forward keeps beside the output are float32 at least.
void give_zeros(const LocalCall& call, torch::jit::Stack& stack) {
  const at::Tensor first = argument(stack, call.info, 0).toTensor();
  torch::jit::drop(stack, call.info.args.size());
  const std::vector<OutputDecision>& outputs = call.plan.decision.outputs;
  const bool forward = outputs.size() == 2;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const SpecPtr spec = intern_contiguous(
        call.plan.mesh, outputs[i].raw, outputs[i].sizes, at::kFloat);
    const at::ScalarType dtype = forward && i == 1
        ? at::toOpMathType(first.scalar_type())
        : first.scalar_type();
    stack.emplace_back(
        at::zeros(spec->local_sizes, first.options().dtype(dtype)));
  }
}

} // namespace

void run_local_kernel(LocalCall& call, torch::jit::Stack& stack) {
  switch (call.plan.decision.kernel) {
    case LocalKernel::kOp:
      call.plan.decision.fallback&& call.info.is_random
          ? run_seeded(call, stack)
          : call_operator(call, stack);
      return;
    case LocalKernel::kNllLoss:
      call_operator(call, stack);
      return;
    case LocalKernel::kMean:
      run_sum(call, stack);
      divide(call, stack);
      return;
    case LocalKernel::kDivide:
      call_operator(call, stack);
      divide(call, stack);
      return;
    case LocalKernel::kView:
      run_view(call, stack);
      return;
    case LocalKernel::kMaximum:
    case LocalKernel::kMinimum:
      run_extremum(
          call, stack, call.plan.decision.kernel == LocalKernel::kMaximum);
      return;
    case LocalKernel::kNorm:
      run_norm(call, stack);
      return;
    case LocalKernel::kZerosIfEmpty:
      give_zeros(call, stack);
      return;
    case LocalKernel::kRandom:
      run_random(call, stack);
      return;
    case LocalKernel::kFusedSdpChoice:
      run_sdp_choice(call, stack);
      return;
  }
}

void finish_results(const LocalCall& call, std::vector<at::Tensor>& results) {
  const Decision& decision = call.plan.decision;
  if (decision.kernel == LocalKernel::kNllLoss) {
    results.at(0).div_(results.at(1));
  } else if (
      decision.kernel == LocalKernel::kNorm && has_root(call.norm_order)) {
    for (at::Tensor& result : results) {
      call.norm_order == 2 ? result.sqrt_()
                           : result.pow_(1.0 / call.norm_order);
    }
  }
}

} // namespace tessera
