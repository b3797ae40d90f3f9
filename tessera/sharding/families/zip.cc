// SPDX-License-Identifier: Apache-2.0
//
// Operators on lists: element i of every list is a pointwise call (or a norm)
// of its own, whatever the others do. A tensor beside the lists (a learning
// rate, a scale) is shared and replicated.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>
#include <tessera/sharding/families/reduction.h>

#include <algorithm>

namespace tessera::rules {
namespace {

// Row::mode.
enum ZipMode : int {
  kPointwise,
  kCopy, // copy_: the first list is not read
  kNorm,
  kFused // an optimizer's update; its gradients (list 1) are written only to
         // unscale them
};

// Reads: ops, linear (lists by number), decides, mode.
constexpr Row kZipRows[] = {
    {.ops = "_foreach_abs{,_}"},
    {.ops = "_foreach_acos{,_}"},
    {.ops = "_foreach_add{.List,_.List}", .linear = "01"},
    {.ops = "_foreach_add{.Scalar,_.Scalar,.ScalarList,_.ScalarList,.Tensor,_."
            "Tensor}"},
    {.ops = "_foreach_addcdiv{.Scalar,_.Scalar,.ScalarList,_.ScalarList,."
            "Tensor,_.Tensor}",
     .linear = "01"},
    {.ops = "_foreach_addcmul{.Scalar,_.Scalar,.ScalarList,_.ScalarList,."
            "Tensor,_.Tensor}",
     .linear = "01,02"},
    {.ops = "_foreach_asin{,_}"},
    {.ops = "_foreach_atan{,_}"},
    {.ops = "_foreach_ceil{,_}"},
    {.ops = "_foreach_clamp_max{.Scalar,_.Scalar,.List,_.List,.ScalarList,_."
            "ScalarList}"},
    {.ops = "_foreach_clamp_min{.Scalar,_.Scalar,.List,_.List,.ScalarList,_."
            "ScalarList}"},
    {.ops = "_foreach_clone", .linear = "0"},
    {.ops = "_foreach_copy_", .linear = "01", .mode = kCopy},
    {.ops = "_foreach_cos{,_}"},
    {.ops = "_foreach_cosh{,_}"},
    {.ops = "_foreach_div{.Scalar,_.Scalar,.List,_.List,.ScalarList,_."
            "ScalarList,.Tensor,_.Tensor}",
     .linear = "0"},
    {.ops = "_foreach_erf{,_}"},
    {.ops = "_foreach_erfc{,_}"},
    {.ops = "_foreach_exp{,_}"},
    {.ops = "_foreach_expm1{,_}"},
    {.ops = "_foreach_floor{,_}"},
    {.ops = "_foreach_frac{,_}"},
    {.ops = "_foreach_lerp{.List,_.List,.Scalar,_.Scalar,.ScalarList,_."
            "ScalarList}",
     .linear = "01"},
    {.ops = "_foreach_lgamma{,_}"},
    {.ops = "_foreach_log{,_}"},
    {.ops = "_foreach_log10{,_}"},
    {.ops = "_foreach_log1p{,_}"},
    {.ops = "_foreach_log2{,_}"},
    {.ops = "_foreach_maximum{.Scalar,_.Scalar,.List,_.List,.ScalarList,_."
            "ScalarList}"},
    {.ops = "_foreach_minimum{.Scalar,_.Scalar,.List,_.List,.ScalarList,_."
            "ScalarList}"},
    {.ops = "_foreach_mul{.List,_.List}", .linear = "0,1"},
    {.ops = "_foreach_mul{.Scalar,_.Scalar,.ScalarList,_.ScalarList,.Tensor,_."
            "Tensor}",
     .linear = "0"},
    {.ops = "_foreach_neg{,_}", .linear = "0"},
    {.ops = "_foreach_norm.Scalar", .decides = 1, .mode = kNorm},
    {.ops = "_foreach_pow{.List,_.List,.Scalar,_.Scalar,.ScalarList,_."
            "ScalarList,.ScalarAndTensor}"},
    {.ops = "_foreach_reciprocal{,_}"},
    {.ops = "_foreach_round{,_}"},
    {.ops = "_foreach_rsqrt{,_}"},
    {.ops = "_foreach_sigmoid{,_}"},
    {.ops = "_foreach_sign{,_}"},
    {.ops = "_foreach_sin{,_}"},
    {.ops = "_foreach_sinh{,_}"},
    {.ops = "_foreach_sqrt{,_}"},
    {.ops = "_foreach_sub{.List,_.List}", .linear = "01"},
    {.ops = "_foreach_sub{.Scalar,_.Scalar,.ScalarList,_.ScalarList}"},
    {.ops = "_foreach_tan{,_}"},
    {.ops = "_foreach_tanh{,_}"},
    {.ops = "_foreach_trunc{,_}"},
    {.ops = "_foreach_zero_", .linear = "0"},
    {.ops = "_fused_adam_{,.tensor_lr}", .mode = kFused},
    {.ops = "_fused_adamw_{,.tensor_lr}", .mode = kFused},
    {.ops = "_fused_adagrad_{,.tensor_lr}", .mode = kFused},
    {.ops = "_fused_sgd_{,.tensor_lr}", .mode = kFused},
};

// Where a list argument's elements lie among the call's operands.
struct List {
  size_t begin;
  size_t size;
};

std::vector<List> lists_of(const OpCall& call) {
  std::vector<List> lists;
  size_t position = 0;
  for (const OpArg& arg : call.args) {
    if (arg.kind == OpArg::Kind::kTensorList) {
      lists.push_back({position, arg.tensors.size()});
      position += arg.tensors.size();
    } else if (arg.kind == OpArg::Kind::kTensor) {
      ++position;
    }
  }
  return lists;
}

// Fused updates have grad_scale as their last argument but one.
bool unscales_gradients(const OpCall& call) {
  return call.args.size() > 2 &&
      call.args[call.args.size() - 2].kind == OpArg::Kind::kTensor &&
      call.args[call.args.size() - 2].tensor != nullptr;
}

Line norm(const Row& row, const OpCall& call, std::vector<Operand> operands) {
  const std::vector<bool> reduced(operands[0].dims.size(), true);
  const auto op = norm_reduction(call.args[static_cast<size_t>(row.decides)]);
  Line line = reduce_line(std::move(operands), reduced, false, op, 1);
  finish_norm(line, row.decides);
  line.kernel = LocalKernel::kNorm; // for all elements alike, cut or not
  return line;
}

Line element(
    const Row& row, const OpCall& call, std::vector<Operand> operands) {
  if (row.mode == kNorm) {
    return norm(row, call, std::move(operands));
  }
  if (row.mode == kFused && operands.size() > 1) {
    operands[1].written = operands[1].written && unscales_gradients(call);
  }
  operands[0].shape_only = row.mode == kCopy;
  const bool same_dtype =
      row.mode == kCopy && operands[0].spec->dtype == operands[1].spec->dtype;
  Line line = broadcast_line(std::move(operands), 1);
  if (row.mode != kCopy || same_dtype) {
    set_linear(line, row.linear);
  }
  return line;
}

std::vector<Part> build_zip(const Row& row, const OpCall& call) {
  const auto operands = operands_of(call);
  const auto lists = lists_of(call);
  std::vector<Part> parts;
  for (size_t i = 0; !lists.empty() && i < lists[0].size; ++i) {
    Part part;
    std::vector<Operand> mine;
    for (const List& list : lists) {
      if (list.size == 0) {
        continue; // a state that this optimizer does not keep
      }
      if (list.size != lists[0].size) {
        throw UsageError(fmt::format(
            "{}: lists of {} and {} tensors; expected equal lengths",
            call.op,
            lists[0].size,
            list.size));
      }
      part.positions.push_back(list.begin + i);
      mine.push_back(operands[list.begin + i]);
    }
    part.line = element(row, call, std::move(mine));
    parts.push_back(std::move(part));
  }
  return parts;
}

} // namespace

const Table& zip_table() {
  static const Table table{"zip", nullptr, build_zip, kZipRows};
  return table;
}

} // namespace tessera::rules
