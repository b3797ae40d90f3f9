// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/line.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tessera::rules {

Letter Line::add_letter(int64_t extent, std::optional<ReduceOp> reduction) {
  letters.push_back({extent, reduction});
  return static_cast<Letter>(letters.size()) - 1;
}

namespace {

Operand operand_of(SpecPtr spec, bool written) {
  Operand operand;
  operand.spec = spec;
  operand.written = written;
  if (spec != nullptr) {
    operand.dims.resize(spec->sizes.size());
  }
  return operand;
}

} // namespace

std::vector<Operand> operands_of(const OpCall& call) {
  std::vector<Operand> operands;
  for (const OpArg& arg : call.args) {
    if (arg.kind == OpArg::Kind::kTensor) {
      operands.push_back(operand_of(arg.tensor, arg.written));
    } else if (arg.kind == OpArg::Kind::kTensorList) {
      for (const SpecPtr tensor : arg.tensors) {
        operands.push_back(operand_of(tensor, arg.written));
      }
    }
  }
  return operands;
}

Line replicate(const OpCall& call) {
  Line line;
  line.operands = operands_of(call);
  return line;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

namespace {

// Dense strides with the dims of `order` from innermost to outermost.
std::vector<int64_t> strides_in_order(
    const std::vector<int64_t>& sizes, const std::vector<size_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (const size_t d : order) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

// Strides of an operand in the dims of the broadcast shape; 0 where it is
// broadcast.
std::vector<int64_t> broadcast_strides(
    const TensorSpec& spec, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t offset = sizes.size() - spec.sizes.size();
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    const bool broadcast = spec.sizes[d] == 1 && sizes[offset + d] != 1;
    strides[offset + d] = broadcast ? 0 : spec.strides[d];
  }
  return strides;
}

// Whether dim a should lie outside dim b: -1 no, 1 yes, 0 the operands leave it
// open. The first operand that knows decides.
int outside(
    size_t a,
    size_t b,
    const std::vector<int64_t>& sizes,
    const std::vector<std::vector<int64_t>>& operands) {
  for (const auto& strides : operands) {
    if (strides[a] == 0 || strides[b] == 0) {
      continue;
    }
    if (strides[a] != strides[b]) {
      return strides[a] < strides[b] ? -1 : 1;
    }
    if (sizes[a] > sizes[b]) {
      return 1;
    }
  }
  return 0;
}

} // namespace

std::vector<int64_t> dense_strides(
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& like) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return like[a] < like[b];
  });
  return strides_in_order(sizes, order);
}

std::vector<int64_t> iterator_strides(
    const std::vector<int64_t>& sizes, const std::vector<SpecPtr>& operands) {
  std::vector<std::vector<int64_t>> strides;
  for (const SpecPtr spec : operands) {
    if (spec != nullptr && spec->sizes.size() <= sizes.size()) {
      strides.push_back(broadcast_strides(*spec, sizes));
    }
  }
  std::vector<size_t> order(sizes.size()); // innermost first
  std::iota(order.rbegin(), order.rend(), size_t{0});
  for (size_t i = 1; i < order.size();
       ++i) { // insertion sort that steps over dims whose order is open
    size_t moving = i;
    for (size_t j = i; j-- > 0;) {
      const int comparison = outside(order[j], order[moving], sizes, strides);
      if (comparison > 0) {
        std::swap(order[j], order[moving]);
        moving = j;
      } else if (comparison < 0) {
        break;
      }
    }
  }
  auto result = strides_in_order(sizes, order);
  return result == contiguous_strides(sizes) ? std::vector<int64_t>() : result;
}

int64_t wrap_dim(const OpCall& call, int64_t dim, int64_t rank) {
  const int64_t limit = std::max<int64_t>(rank, 1);
  if (dim < -limit || dim >= limit) {
    throw UsageError(fmt::format(
        "{}: dim {} of a tensor with {} dims; expected {} to {}",
        call.op,
        dim,
        rank,
        -limit,
        limit - 1));
  }
  return dim < 0 ? dim + limit : dim;
}

} // namespace tessera::rules
