// SPDX-License-Identifier: Apache-2.0
//
// Pointwise operators: operands are broadcast against each other, every dim of
// the common shape is a letter, nothing is reduced. The same line with some
// dims whole is the family "locked" (softmax, cumsum, sort).
#include <c10/core/MemoryFormat.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>

#include <algorithm>
#include <string>

namespace tessera::rules {
namespace {

// Row::mode of the pointwise family.
enum PointwiseMode : int {
  kPlain,
  kCopy, // passes every Partial; a memory_format argument may ask for
         // contiguous
  kCast, // the same where the dtype stays; linear when a floating result or
         // integers stay exact
  kLinearAtZero, // linear in the first operand when the value that decides is 0
  kOverwrite, // the first operand is written and not read
  kReversed // the first operand comes second in memory order
};

// Reads: ops, linear (tensor arguments by number), decides, mode, results.
constexpr Row kPointwiseRows[] = {
    // One operand.
    {.ops = "abs{,_,.out}"},
    {.ops = "acos{,_,.out}"},
    {.ops = "acosh{,_,.out}"},
    {.ops = "asin{,_,.out}"},
    {.ops = "asinh{,_,.out}"},
    {.ops = "atan{,_,.out}"},
    {.ops = "atanh{,_,.out}"},
    {.ops = "bitwise_not{,_,.out}"},
    {.ops = "ceil{,_,.out}"},
    {.ops = "celu{,_,.out}"},
    {.ops = "clamp{,_,.out,.Tensor,_.Tensor,.Tensor_out}"},
    {.ops = "clamp_max{,_,.out,.Tensor,_.Tensor,.Tensor_out}"},
    {.ops = "clamp_min{,_,.out,.Tensor,_.Tensor,.Tensor_out}"},
    {.ops = "cos{,_,.out}"},
    {.ops = "cosh{,_,.out}"},
    {.ops = "digamma{,_,.out}"},
    {.ops = "elu{,_,.out}"},
    {.ops = "erf{,_,.out}"},
    {.ops = "erfc{,_,.out}"},
    {.ops = "erfinv{,_,.out}"},
    {.ops = "exp{,_,.out}"},
    {.ops = "exp2{,_,.out}"},
    {.ops = "expm1{,_,.out}"},
    {.ops = "floor{,_,.out}"},
    {.ops = "frac{,_,.out}"},
    {.ops = "gelu{,_,.out}"},
    {.ops = "hardshrink{,.out}"},
    {.ops = "hardsigmoid{,_,.out}"},
    {.ops = "hardswish{,_,.out}"},
    {.ops = "hardtanh{,_,.out}"},
    {.ops = "isfinite"},
    {.ops = "isinf{,.out}"},
    {.ops = "isnan{,.out}"},
    {.ops = "isneginf{,.out}"},
    {.ops = "isposinf{,.out}"},
    {.ops = "leaky_relu{,_,.out}"},
    {.ops = "lgamma{,_,.out}"},
    {.ops = "log{,_,.out}"},
    {.ops = "log10{,_,.out}"},
    {.ops = "log1p{,_,.out}"},
    {.ops = "log2{,_,.out}"},
    {.ops = "log_sigmoid_forward", .results = 2},
    {.ops = "logical_not{,_,.out}"},
    {.ops = "logit{,_,.out}"},
    {.ops = "mish{,_,.out}"},
    {.ops = "nan_to_num{,_,.out}"},
    {.ops = "neg{,_,.out}", .linear = "0"},
    {.ops = "reciprocal{,_,.out}"},
    {.ops = "relu{,_,.out}"},
    {.ops = "relu6{,_}"},
    {.ops = "round{,_,.out,.decimals,_.decimals}"},
    {.ops = "rsqrt{,_,.out}"},
    {.ops = "selu{,_}"},
    {.ops = "sgn{,_,.out}"},
    {.ops = "sigmoid{,_,.out}"},
    {.ops = "sign{,_,.out}"},
    {.ops = "signbit{,.out}"},
    {.ops = "silu{,_,.out}"},
    {.ops = "sin{,_,.out}"},
    {.ops = "sinc{,_,.out}"},
    {.ops = "sinh{,_,.out}"},
    {.ops = "softplus{,.out}"},
    {.ops = "softshrink{,.out}"},
    {.ops = "sqrt{,_,.out}"},
    {.ops = "square{,_,.out}"},
    {.ops = "tan{,_,.out}"},
    {.ops = "tanh{,_,.out}"},
    {.ops = "threshold{,_,.out}"},
    {.ops = "trunc{,_,.out}"},
    {.ops = "positive", .linear = "0", .mode = kCopy},

    // Two operands.
    {.ops = "add{.Tensor,_.Tensor,.out}", .linear = "01"},
    {.ops = "add{.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "sub{.Tensor,_.Tensor,.out}", .linear = "01"},
    {.ops = "sub{.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "rsub.Tensor", .linear = "01", .mode = kReversed},
    {.ops = "rsub.Scalar"},
    {.ops = "mul{.Tensor,_.Tensor,.out}", .linear = "0,1"},
    {.ops = "mul{.Scalar,_.Scalar,.Scalar_out}", .linear = "0"},
    {.ops = "div{.Tensor,_.Tensor,.out,.Scalar,_.Scalar,.Scalar_out}",
     .linear = "0"},
    {.ops = "div{.Tensor_mode,_.Tensor_mode,.out_mode,.Scalar_mode,_.Scalar_"
            "mode,.Scalar_mode_out}"},
    {.ops = "atan2{,_,.out}"},
    {.ops = "bitwise_and{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar}"},
    {.ops = "bitwise_or{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar}"},
    {.ops = "bitwise_xor{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar}"},
    {.ops = "copysign{.Tensor,_.Tensor,.out,.Scalar,_.Scalar}"},
    {.ops = "eq{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "ne{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "lt{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "le{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "gt{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "ge{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "floor_divide{,_.Tensor,.out,.Scalar,_.Scalar}"},
    {.ops = "fmax{,.out}"},
    {.ops = "fmin{,.out}"},
    {.ops = "fmod{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_out}"},
    {.ops = "hypot{,_,.out}"},
    {.ops = "logaddexp{,.out}"},
    {.ops = "logaddexp2{,.out}"},
    {.ops = "logical_and{,_,.out}"},
    {.ops = "logical_or{,_,.out}"},
    {.ops = "logical_xor{,_,.out}"},
    {.ops = "max{.other,.out}"},
    {.ops = "min{.other,.out}"},
    {.ops = "maximum{,.out}"},
    {.ops = "minimum{,.out}"},
    {.ops = "pow{.Tensor_Tensor,_.Tensor,.Tensor_Tensor_out,.Tensor_Scalar,_."
            "Scalar,.Tensor_Scalar_out,.Scalar,.Scalar_out}"},
    {.ops = "remainder{.Tensor,_.Tensor,.Tensor_out,.Scalar,_.Scalar,.Scalar_"
            "out,.Scalar_Tensor}"},
    {.ops = "xlogy{.Tensor,_.Tensor,.OutTensor,.Scalar_Self,.Scalar_Other,_."
            "Scalar_Other}"},

    // Three operands.
    {.ops = "addcdiv{,_,.out}", .linear = "01"},
    {.ops = "addcmul{,_,.out}", .linear = "01,02"},
    {.ops = "lerp{.Scalar,_.Scalar,.Scalar_out,.Tensor,_.Tensor,.Tensor_out}",
     .linear = "01"},
    {.ops = "masked_fill{.Scalar,_.Scalar}",
     .linear = "0",
     .decides = 2,
     .mode = kLinearAtZero},
    {.ops = "masked_fill{.Tensor,_.Tensor}", .linear = "02"},
    {.ops = "where{.self,.self_out}", .linear = "12"},
    {.ops = "where{.ScalarSelf,.ScalarOther,.Scalar}"},

    // Gradients: linear in the first operand, the incoming gradient.
    {.ops = "elu_backward", .linear = "0"},
    {.ops = "gelu_backward{,.grad_input}", .linear = "0"},
    {.ops = "hardshrink_backward", .linear = "0"},
    {.ops = "hardsigmoid_backward", .linear = "0"},
    {.ops = "hardswish_backward", .linear = "0"},
    {.ops = "hardtanh_backward", .linear = "0"},
    {.ops = "leaky_relu_backward", .linear = "0"},
    {.ops = "log_sigmoid_backward", .linear = "0"},
    {.ops = "logit_backward", .linear = "0"},
    {.ops = "mish_backward", .linear = "0"},
    {.ops = "native_dropout_backward", .linear = "0"},
    {.ops = "sigmoid_backward{,.grad_input}", .linear = "0"},
    {.ops = "silu_backward{,.grad_input}", .linear = "0"},
    {.ops = "softplus_backward", .linear = "0"},
    {.ops = "softshrink_backward", .linear = "0"},
    {.ops = "tanh_backward{,.grad_input}", .linear = "0"},
    {.ops = "threshold_backward{,.grad_input}", .linear = "0"},

    // Copies and fills.
    {.ops = "clone", .linear = "0", .mode = kCopy},
    {.ops = "_to_copy", .linear = "0", .mode = kCast},
    {.ops = "copy{,_}", .linear = "01", .mode = kCast},
    {.ops = "fill_{.Scalar,.Tensor}", .mode = kOverwrite},
    {.ops = "zero_", .linear = "0"},
};

bool writes_result(const OpCall& call) {
  const size_t dot = call.op.find('.');
  const std::string overload =
      dot == std::string::npos ? "" : call.op.substr(dot + 1);
  return overload.find("out") != std::string::npos ||
      overload.find("Out") != std::string::npos || overload == "grad_input";
}

bool is_floating(int64_t dtype) {
  const auto type = static_cast<c10::ScalarType>(dtype);
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

// copy_(self, src) and copy(self, src): what counts is src; _to_copy(self,
// dtype).
void set_cast(Line& line, const OpCall& call, std::string_view groups) {
  const bool into = line.operands.size() > 1;
  const auto source =
      static_cast<int64_t>(line.operands[into ? 1 : 0].spec->dtype);
  const bool asked = !into && call.args[1].kind == OpArg::Kind::kDtype;
  const int64_t target = into
      ? static_cast<int64_t>(line.operands[0].spec->dtype)
      : asked ? call.args[1].integer
              : source;
  const auto boolean = static_cast<int64_t>(c10::ScalarType::Bool);
  line.any_partial = source == target;
  if (into) {
    line.operands[0].shape_only = true;
  }
  if (line.any_partial || is_floating(target) ||
      (!is_floating(source) && source != boolean && target != boolean)) {
    set_linear(line, groups);
  }
}

bool asks_for_contiguous(const Row& row, const OpCall& call) {
  if ((row.mode != kCopy && row.mode != kCast) || call.args.size() < 2) {
    return false;
  }
  const OpArg& format =
      call.args
          .back(); // memory_format is the last argument of clone and _to_copy
  return format.kind == OpArg::Kind::kDtype &&
      format.integer == static_cast<int64_t>(c10::MemoryFormat::Contiguous);
}

void set_mode(Line& line, const Row& row, const OpCall& call) {
  switch (row.mode) {
    case kCast:
      set_cast(line, call, row.linear);
      return;
    case kLinearAtZero: {
      const OpArg& value = call.args[static_cast<size_t>(row.decides)];
      if (value.known && value.real == 0) {
        set_linear(line, row.linear);
      }
      return;
    }
    case kOverwrite:
      line.operands[0].shape_only = true;
      return;
    case kReversed:
      line.results[0].strides = iterator_strides(
          line.results[0].sizes,
          {line.operands[1].spec, line.operands[0].spec});
      set_linear(line, row.linear);
      return;
    default:
      line.any_partial = row.mode == kCopy;
      set_linear(line, row.linear);
  }
}

Line build_pointwise(const Row& row, const OpCall& call) {
  auto operands = operands_of(call);
  for (Operand& operand : operands) {
    operand.out = operand.written && writes_result(call);
    operand.shape_only = operand.out;
  }
  Line line = broadcast_line(std::move(operands), row.results);
  set_mode(line, row, call);
  if (asks_for_contiguous(row, call)) {
    for (Result& result : line.results) {
      result.strides.clear();
    }
  }
  return line;
}

// The shape that operands are broadcast to; those that only receive the result
// do not take part.
std::vector<int64_t> common_shape(const std::vector<Operand>& operands) {
  std::vector<int64_t> shape;
  for (const Operand& operand : operands) {
    if (operand.spec == nullptr || operand.out) {
      continue;
    }
    const auto& sizes = operand.spec->sizes;
    if (sizes.size() > shape.size()) {
      shape.insert(shape.begin(), sizes.size() - shape.size(), 1);
    }
    const size_t offset = shape.size() - sizes.size();
    for (size_t d = 0; d < sizes.size(); ++d) {
      int64_t& extent = shape[offset + d];
      if (extent != sizes[d] && extent != 1 && sizes[d] != 1) {
        throw UsageError(fmt::format(
            "pointwise operator: sizes {} and {} of dim {} do not match; they "
            "must be equal or 1",
            extent,
            sizes[d],
            d));
      }
      extent = extent == 1 ? sizes[d] : extent;
    }
  }
  return shape;
}

} // namespace

Line broadcast_line(std::vector<Operand> operands, int results) {
  Line line;
  const auto shape = common_shape(operands);
  for (const int64_t extent : shape) {
    line.add_letter(extent);
  }
  bool writes = false;
  std::vector<SpecPtr> read;
  for (Operand& operand : operands) {
    writes = writes || operand.written;
    if (operand.spec == nullptr) {
      continue;
    }
    if (!operand.out) {
      read.push_back(operand.spec);
    }
    const auto& sizes = operand.spec->sizes;
    for (size_t d = 0; d < sizes.size() && sizes.size() <= shape.size(); ++d) {
      const size_t letter = shape.size() - sizes.size() + d;
      operand.dims[d].letter =
          sizes[d] == shape[letter] ? static_cast<Letter>(letter) : kWhole;
    }
  }
  line.operands = std::move(operands);
  for (int r = 0; r < (writes ? 0 : results); ++r) {
    Result result;
    result.sizes = shape;
    result.strides = iterator_strides(shape, read);
    for (size_t d = 0; d < shape.size(); ++d) {
      result.dims.push_back({static_cast<Letter>(d), 1});
    }
    line.results.push_back(std::move(result));
  }
  return line;
}

const Table& pointwise_table() {
  static const Table table{
      "pointwise", build_pointwise, nullptr, kPointwiseRows};
  return table;
}

namespace {

// Reads: ops, linear, dims (argument with the dims that stay whole; -1: the
// last two), results.
constexpr Row kLocked[] = {
    {.ops = "_softmax{,.out}", .dims = 1},
    {.ops = "_log_softmax{,.out}", .dims = 1},
    {.ops = "_softmax_backward_data{,.out}", .linear = "0", .dims = 2},
    {.ops = "_log_softmax_backward_data{,.out}", .linear = "0", .dims = 2},
    {.ops = "cumsum{,_,.out}", .linear = "0", .dims = 1},
    {.ops = "cumprod{,_,.out}", .dims = 1},
    {.ops = "logcumsumexp{,.out}", .dims = 1},
    {.ops = "cummax", .dims = 1, .results = 2},
    {.ops = "cummin", .dims = 1, .results = 2},
    {.ops = "sort", .dims = 1, .results = 2},
    {.ops = "sort.stable", .dims = 2, .results = 2},
    {.ops = "argsort", .dims = 1},
    {.ops = "argsort.stable", .dims = 2},
    {.ops = "flip", .linear = "0", .dims = 1},
    {.ops = "roll", .linear = "0", .dims = 2},
    {.ops = "tril{,_,.out}", .linear = "0"},
    {.ops = "triu{,_,.out}", .linear = "0"},
};

// The dims that an argument names; all when it is absent or empty.
std::vector<int64_t> named_dims(
    const Row& row, const OpCall& call, int64_t rank) {
  std::vector<int64_t> dims;
  if (row.dims < 0) {
    dims = {rank - 2, rank - 1};
  } else if (const OpArg& arg = call.args[static_cast<size_t>(row.dims)];
             arg.kind == OpArg::Kind::kInt) {
    dims = {arg.integer};
  } else {
    dims = arg.ints;
  }
  if (dims.empty()) {
    for (int64_t d = 0; d < rank; ++d) {
      dims.push_back(d);
    }
  }
  for (int64_t& dim : dims) {
    dim = wrap_dim(call, dim, rank);
  }
  return dims;
}

Line build_locked(const Row& row, const OpCall& call) {
  Line line = build_pointwise(row, call);
  const auto rank = static_cast<int64_t>(line.letters.size());
  for (const int64_t dim :
       rank == 0 ? std::vector<int64_t>() : named_dims(row, call, rank)) {
    const auto unlock = [&](std::vector<DimUse>& dims) {
      for (DimUse& use : dims) {
        use.letter =
            use.letter == static_cast<Letter>(dim) ? kWhole : use.letter;
      }
    };
    for (Operand& operand : line.operands) {
      unlock(operand.dims);
    }
    for (Result& result : line.results) {
      unlock(result.dims);
    }
  }
  return line;
}

} // namespace

const Table& locked_table() {
  static const Table table{"locked", build_locked, nullptr, kLocked};
  return table;
}

} // namespace tessera::rules
