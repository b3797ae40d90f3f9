// SPDX-License-Identifier: Apache-2.0
#include <tessera/sharding/simulation_kernels.h>

#include <cmath>
#include <limits>

namespace tessera::simulation {
namespace {

std::vector<int64_t> dims_arg(const c10::IValue& value, int64_t rank) {
  std::vector<int64_t> dims =
      value.isIntList() ? value.toIntVector() : std::vector<int64_t>();
  const bool all = dims.empty();
  for (int64_t d = 0; all && d < rank; ++d) {
    dims.push_back(d);
  }
  return dims;
}

// A reduction that a dims argument at this position and keepdim after it rule;
// -1: over all.
template <typename Fn>
at::Tensor reduce(const Stack& stack, int64_t position, Fn&& fn) {
  const at::Tensor x = stack[0].toTensor();
  const auto dims = static_cast<size_t>(position);
  if (position < 0 || stack.size() <= dims + 1) {
    std::vector<int64_t> all;
    for (int64_t d = 0; d < x.dim(); ++d) {
      all.push_back(d);
    }
    return fn(x, all, false);
  }
  return fn(x, dims_arg(stack[dims], x.dim()), stack[dims + 1].toBool());
}

} // namespace

at::Tensor global_mean(
    const std::vector<int64_t>& numbers, const Stack& stack) {
  return reduce(
      stack,
      numbers.at(1),
      [&](const at::Tensor& x, std::vector<int64_t> dims, bool keep) {
        return x.sum(dims, keep) / numbers.at(0);
      });
}

at::Tensor extremum(bool largest, int64_t dims_position, const Stack& stack) {
  return reduce(
      stack,
      dims_position,
      [&](const at::Tensor& x, std::vector<int64_t> dims, bool keep) {
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

namespace {

double order(const c10::IValue& p) {
  return p.isNone() ? 2 : p.toScalar().toDouble();
}

// `dims`: the position of that argument, or -1.
at::Tensor powers_of_one(double p, int64_t dims_position, const Stack& stack) {
  return reduce(
      stack,
      dims_position,
      [&](const at::Tensor& x, std::vector<int64_t> over, bool keep) {
        if (std::isinf(p)) {
          return extremum(p > 0, 1, {x.abs(), c10::IValue(over), keep});
        }
        return p == 0 ? (x != 0).to(x.scalar_type()).sum(over, keep)
                      : x.abs().pow(p).sum(over, keep);
      });
}

} // namespace

std::vector<at::Tensor> powers(int64_t p_position, const Stack& stack) {
  const double p = order(stack[static_cast<size_t>(p_position)]);
  if (!stack[0].isTensorList()) {
    return {powers_of_one(p, p_position + 1, stack)};
  }
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : stack[0].toTensorVector()) {
    out.push_back(powers_of_one(p, -1, {x}));
  }
  return out;
}

at::Tensor root(
    int64_t p_position, const Stack& stack, const at::Tensor& powers_sum) {
  const double p = order(stack[static_cast<size_t>(p_position)]);
  return std::isinf(p) || p == 0 ? powers_sum : powers_sum.pow(1 / p);
}

} // namespace tessera::simulation
