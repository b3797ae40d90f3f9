// SPDX-License-Identifier: Apache-2.0
//
// Reductions over some or all dims. Kept dims are letters without more ado; a
// reduced dim is a letter whose contributions combine by the reduction's own
// operation, or whole where they do not combine (variance, the position of a
// maximum).
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>
#include <tessera/sharding/families/reduction.h>

#include <algorithm>
#include <cmath>

namespace tessera::rules {
namespace {

// Row::mode.
enum ReductionMode : int {
  kSum,
  kMean,
  kMax,
  kMin,
  kAny,
  kAll,
  kProduct,
  kNorm,
  kWholeDims
};

// Reads: ops, linear, dims and keepdim (arguments; -1: all dims, not kept),
// decides (a norm's p), mode, results.
constexpr Row kReductionRows[] = {
    {.ops = "sum{,.out}", .linear = "0", .mode = kSum},
    {.ops = "sum{.dim_IntList,.IntList_out}",
     .linear = "0",
     .dims = 1,
     .keepdim = 2,
     .mode = kSum},
    {.ops = "nansum", .dims = 1, .keepdim = 2, .mode = kSum},
    {.ops = "count_nonzero.dim_IntList", .dims = 1, .mode = kSum},
    {.ops = "mean", .linear = "0", .mode = kMean},
    {.ops = "mean{.dim,.out}",
     .linear = "0",
     .dims = 1,
     .keepdim = 2,
     .mode = kMean},
    {.ops = "amax{,.out}", .dims = 1, .keepdim = 2, .mode = kMax},
    {.ops = "amin{,.out}", .dims = 1, .keepdim = 2, .mode = kMin},
    {.ops = "max", .mode = kMax},
    {.ops = "min", .mode = kMin},
    {.ops = "any", .mode = kAny},
    {.ops = "any{.dim,.dims}", .dims = 1, .keepdim = 2, .mode = kAny},
    {.ops = "all", .mode = kAll},
    {.ops = "all{.dim,.dims}", .dims = 1, .keepdim = 2, .mode = kAll},
    {.ops = "prod", .mode = kProduct},
    {.ops = "prod.dim_int", .dims = 1, .keepdim = 2, .mode = kProduct},
    {.ops = "linalg_vector_norm",
     .dims = 2,
     .keepdim = 3,
     .decides = 1,
     .mode = kNorm},
    {.ops = "norm{.Scalar,.ScalarOpt_dtype}", .decides = 1, .mode = kNorm},
    {.ops = "norm{.ScalarOpt_dim,.ScalarOpt_dim_dtype}",
     .dims = 2,
     .keepdim = 3,
     .decides = 1,
     .mode = kNorm},
    {.ops = "var.correction", .dims = 1, .keepdim = 3, .mode = kWholeDims},
    {.ops = "std.correction", .dims = 1, .keepdim = 3, .mode = kWholeDims},
    {.ops = "var_mean.correction",
     .dims = 1,
     .keepdim = 3,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "std_mean.correction",
     .dims = 1,
     .keepdim = 3,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "argmax", .dims = 1, .keepdim = 2, .mode = kWholeDims},
    {.ops = "argmin", .dims = 1, .keepdim = 2, .mode = kWholeDims},
    {.ops = "max.dim",
     .dims = 1,
     .keepdim = 2,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "min.dim",
     .dims = 1,
     .keepdim = 2,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "median", .mode = kWholeDims},
    {.ops = "median.dim",
     .dims = 1,
     .keepdim = 2,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "mode", .dims = 1, .keepdim = 2, .mode = kWholeDims, .results = 2},
    {.ops = "kthvalue",
     .dims = 2,
     .keepdim = 3,
     .mode = kWholeDims,
     .results = 2},
    {.ops = "logsumexp{,.out}", .dims = 1, .keepdim = 2, .mode = kWholeDims},
};

std::vector<bool> reduced_dims(
    const Row& row, const OpCall& call, int64_t rank) {
  std::vector<int64_t> dims;
  if (row.dims >= 0) {
    const OpArg& arg = call.args[static_cast<size_t>(row.dims)];
    dims = arg.kind == OpArg::Kind::kInt ? std::vector<int64_t>{arg.integer}
                                         : arg.ints;
  }
  std::vector<bool> reduced(static_cast<size_t>(rank), dims.empty());
  for (const int64_t dim : dims) {
    const auto wrapped = static_cast<size_t>(wrap_dim(call, dim, rank));
    if (rank > 0) {
      reduced[wrapped] = true;
    }
  }
  return reduced;
}

void set_reduction(Line& line, const Row& row, int64_t count) {
  switch (row.mode) {
    case kMean:
      line.kernel_when_contracted = LocalKernel::kMean;
      line.numbers = {count, row.dims};
      break;
    case kMax:
      line.kernel_when_contracted = LocalKernel::kMaximum;
      line.numbers = {row.dims};
      break;
    case kMin:
      line.kernel_when_contracted = LocalKernel::kMinimum;
      line.numbers = {row.dims};
      break;
    default:
      break;
  }
}

std::optional<ReduceOp> combine(const Row& row, const OpCall& call) {
  switch (row.mode) {
    case kSum:
    case kMean:
      return ReduceOp::kSum;
    case kMax:
    case kAny:
      return ReduceOp::kMax;
    case kMin:
    case kAll:
      return ReduceOp::kMin;
    case kProduct:
      return ReduceOp::kProduct;
    case kNorm:
      return norm_reduction(call.args[static_cast<size_t>(row.decides)]);
    default:
      return std::nullopt;
  }
}

Line build_reduction(const Row& row, const OpCall& call) {
  auto operands = operands_of(call);
  const SpecPtr input = operands[0].spec;
  const auto reduced = reduced_dims(row, call, input->dim());
  const bool keep = row.keepdim >= 0 &&
      call.args[static_cast<size_t>(row.keepdim)].integer != 0;
  const auto reduction = combine(row, call);
  Line line =
      reduce_line(std::move(operands), reduced, keep, reduction, row.results);
  int64_t count = 1;
  for (size_t d = 0; d < reduced.size(); ++d) {
    count *= reduced[d] ? input->sizes[d] : 1;
  }
  if (row.mode == kNorm) {
    finish_norm(line, row.decides);
  } else {
    set_reduction(line, row, count);
  }
  set_linear(line, row.linear);
  return line;
}

} // namespace

std::optional<ReduceOp> norm_reduction(const OpArg& p) {
  if (p.kind != OpArg::Kind::kReal) {
    return p.kind == OpArg::Kind::kNone ? std::optional(ReduceOp::kSum)
                                        : std::nullopt;
  }
  if (!p.known || std::isnan(p.real)) {
    return std::nullopt;
  }
  return !std::isinf(p.real) ? ReduceOp::kSum
      : p.real > 0           ? ReduceOp::kMax
                             : ReduceOp::kMin;
}

void finish_norm(Line& line, int64_t p) {
  line.kernel_when_contracted = LocalKernel::kNorm;
  line.numbers = {p};
  line.finished = true;
}

Line reduce_line(
    std::vector<Operand> operands,
    const std::vector<bool>& reduced,
    bool keep,
    std::optional<ReduceOp> reduction,
    int results) {
  Line line;
  Result result;
  Operand& input = operands[0];
  for (size_t d = 0; d < reduced.size(); ++d) {
    const int64_t extent = input.spec->sizes[d];
    if (!reduced[d] || reduction) {
      input.dims[d].letter =
          line.add_letter(extent, reduced[d] ? reduction : std::nullopt);
    }
    if (!reduced[d]) {
      result.dims.push_back(input.dims[d]);
      result.sizes.push_back(extent);
    } else if (keep) {
      result.dims.push_back(DimUse());
      result.sizes.push_back(1);
    }
  }
  bool writes = false;
  for (size_t i = 1; i < operands.size();
       ++i) { // those that receive the results
    Operand& operand = operands[i];
    writes = writes || operand.written;
    operand.shape_only = operand.written;
    if (operand.spec != nullptr && operand.written &&
        operand.spec->sizes == result.sizes) {
      operand.dims = result.dims;
    }
  }
  line.operands = std::move(operands);
  line.results.assign(writes ? 0 : static_cast<size_t>(results), result);
  return line;
}

const Table& reduction_table() {
  static const Table table{
      "reduction", build_reduction, nullptr, kReductionRows};
  return table;
}

} // namespace tessera::rules
