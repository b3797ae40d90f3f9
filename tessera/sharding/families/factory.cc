// SPDX-License-Identifier: Apache-2.0
//
// Fresh tensors shaped like another one, and random numbers. The other tensor's
// values are not read: a Partial is not reduced for its shape.
#include <c10/core/MemoryFormat.h>
#include <tessera/sharding/families.h>

#include <algorithm>

namespace tessera::rules {
namespace {

// Row::mode of the factories.
enum FactoryMode : int {
  kChoice, // of an attention kernel: global shapes decide, nothing moves
  kEmptyLike, // keeps every placement
  kFillLike, // of a Partial: replicated
  kNewEmpty, // with the sizes of argument 1; where they are the input's own, as
             // *_like
  kNewEmptyStrided, // with the strides of argument 2 too
  kNewFilled
};

// Reads: ops, mode, results.
constexpr Row kFactoryRows[] = {
    {.ops = "empty_like", .mode = kEmptyLike},
    {.ops = "zeros_like", .mode = kFillLike},
    {.ops = "ones_like", .mode = kFillLike},
    {.ops = "full_like", .mode = kFillLike},
    {.ops = "new_empty", .mode = kNewEmpty},
    {.ops = "new_empty_strided", .mode = kNewEmptyStrided},
    {.ops = "new_zeros", .mode = kNewFilled},
    {.ops = "new_ones", .mode = kNewFilled},
    {.ops = "new_full", .mode = kNewFilled},
    {.ops = "_fused_sdp_choice", .mode = kChoice, .results = 0},
};

bool asks_for_contiguous(const OpCall& call) {
  const OpArg& format = call.args.back();
  return format.kind == OpArg::Kind::kDtype &&
      format.integer == static_cast<int64_t>(c10::MemoryFormat::Contiguous);
}

Line like(const OpCall& call) {
  auto operands = operands_of(call);
  operands[0].shape_only = true;
  Line line = broadcast_line(std::move(operands), 1);
  if (asks_for_contiguous(call)) {
    line.results[0].strides.clear();
  }
  return line;
}

// Result 0 with the sizes (and strides) that the call names, which become this
// rank's.
void take_sizes(Line& line, const OpCall& call, bool strided) {
  Result& result = line.results[0];
  result.sizes = call.args[1].ints;
  result.dims.resize(result.sizes.size());
  result.strides = strided ? call.args[2].ints : std::vector<int64_t>();
  line.edits = {{1, LocalEdit::What::kSizes}};
  if (strided) {
    line.edits.push_back({2, LocalEdit::What::kStrides});
  }
  line.operands[0].untouched = true;
}

Line untouched(const OpCall& call) {
  Line line = replicate(call);
  for (Operand& operand : line.operands) {
    operand.shape_only = true;
    operand.untouched = true;
  }
  line.kernel = LocalKernel::kFusedSdpChoice;
  return line;
}

Line build_factory(const Row& row, const OpCall& call) {
  if (row.mode == kChoice) {
    return untouched(call);
  }
  Line line = like(call);
  const bool fresh = row.mode >= kNewEmpty;
  const bool same = !fresh || call.args[1].ints == line.operands[0].spec->sizes;
  if (!same) {
    line.operands[0].dims.assign(line.operands[0].dims.size(), DimUse());
    line.letters.clear();
    line.results[0] = Result();
  }
  if (fresh) {
    take_sizes(line, call, row.mode == kNewEmptyStrided);
  }
  if (same &&
      (row.mode == kEmptyLike || row.mode == kNewEmpty ||
       row.mode == kNewEmptyStrided)) {
    line.linear = {{0}};
    line.any_partial = true;
  }
  return line;
}

// Reads: ops, mode (0: the values of the first operand are not read; 1: they
// are probabilities or what is dropped from), results.
constexpr Row kRandomRows[] = {
    {.ops = "native_dropout", .mode = 1, .results = 2},
    {.ops = "bernoulli{,.out}", .mode = 1},
    {.ops = "bernoulli{.p,_.float,_.Tensor}"},
    {.ops = "cauchy_"},
    {.ops = "exponential_"},
    {.ops = "geometric_"},
    {.ops = "log_normal_"},
    {.ops = "normal_"},
    {.ops = "rand_like"},
    {.ops = "randint_like{,.low_dtype}"},
    {.ops = "randn_like"},
    {.ops = "random_{,.from,.to}"},
    {.ops = "uniform_"},
};

Line build_random(const Row& row, const OpCall& call) {
  auto operands = operands_of(call);
  operands[0].shape_only = row.mode == 0;
  for (size_t i = 1; i < operands.size(); ++i) {
    operands[i].out = operands[i].written;
    operands[i].shape_only = operands[i].out;
  }
  Line line = broadcast_line(std::move(operands), row.results);
  line.kernel = LocalKernel::kRandom;
  return line;
}

} // namespace

const Table& factory_table() {
  static const Table table{"factory", build_factory, nullptr, kFactoryRows};
  return table;
}

const Table& random_table() {
  static const Table table{"random", build_random, nullptr, kRandomRows};
  return table;
}

} // namespace tessera::rules
