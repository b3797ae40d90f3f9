// SPDX-License-Identifier: Apache-2.0
//
// Losses, whose argument `reduction` (none, mean, sum) decides what the result
// is. The mean over a cut batch is no mean of means: the local call sums, and
// the global count (for class weights: their global sum) divides.
#include <tessera/sharding/families.h>

#include <algorithm>
#include <numeric>

namespace tessera::rules {
namespace {

// The values of a `reduction` argument, as in at::Reduction.
constexpr int64_t kNone = 0;
constexpr int64_t kMean = 1;
constexpr int64_t kSum = 2;

// Row::mode.
enum LossMode : int { kForward, kBackward, kNll, kNllBackward };

// Reads: ops, mode, dims (the argument `reduction`).
constexpr Row kLossRows[] = {
    {.ops = "mse_loss", .dims = 2, .mode = kForward},
    {.ops = "smooth_l1_loss", .dims = 2, .mode = kForward},
    {.ops = "huber_loss", .dims = 2, .mode = kForward},
    {.ops = "soft_margin_loss", .dims = 2, .mode = kForward},
    {.ops = "binary_cross_entropy", .dims = 3, .mode = kForward},
    {.ops = "binary_cross_entropy_with_logits", .dims = 4, .mode = kForward},
    {.ops = "mse_loss_backward", .dims = 3, .mode = kBackward},
    {.ops = "smooth_l1_loss_backward", .dims = 3, .mode = kBackward},
    {.ops = "huber_loss_backward", .dims = 3, .mode = kBackward},
    {.ops = "soft_margin_loss_backward", .dims = 3, .mode = kBackward},
    {.ops = "binary_cross_entropy_backward", .dims = 4, .mode = kBackward},
    {.ops = "nll_loss{_forward,2d_forward}", .dims = 3, .mode = kNll},
    {.ops = "nll_loss{_backward,2d_backward}", .dims = 4, .mode = kNllBackward},
};

int64_t count(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The local call sums and the global count divides.
void divide(Line& line, const Row& row, int64_t elements) {
  line.numbers = {elements};
  line.kernel_edits = {{row.dims, {kSum}, true}};
}

Line elementwise_forward(
    const Row& row, const OpCall& call, int64_t reduction) {
  Line line = broadcast_line(operands_of(call), 1);
  if (reduction == kNone) {
    return line;
  }
  if (reduction == kMean) {
    line.kernel_when_contracted = LocalKernel::kDivide;
    divide(line, row, count(line.results[0].sizes));
  }
  for (LetterInfo& letter : line.letters) {
    letter.reduction = ReduceOp::kSum;
  }
  line.results[0] = Result();
  return line;
}

Line elementwise_backward(
    const Row& row, const OpCall& call, int64_t reduction) {
  Line line = broadcast_line(operands_of(call), 1);
  if (reduction == kMean) {
    line.kernel = LocalKernel::kDivide;
    divide(line, row, count(line.results[0].sizes));
  }
  line.linear = {{0}};
  return line;
}

// Letters for all dims of the scores but the class; gives the targets' dims as
// well.
std::vector<DimUse> letter_batch(
    Line& line, Operand& scores, std::optional<ReduceOp> reduction) {
  const auto rank = scores.dims.size();
  const size_t classes = rank == 1 ? 0 : 1;
  std::vector<DimUse> batch;
  for (size_t d = 0; d < rank; ++d) {
    if (d != classes) {
      scores.dims[d].letter = line.add_letter(scores.spec->sizes[d], reduction);
      batch.push_back(scores.dims[d]);
    }
  }
  return batch;
}

void set_dims(Operand& operand, const std::vector<DimUse>& dims) {
  if (operand.dims.size() == dims.size()) {
    operand.dims = dims;
  }
}

// (scores, target, weight?, reduction, ignore_index) -> (loss, total_weight)
Line nll_forward(const Row& row, const OpCall& call, int64_t reduction) {
  Line line;
  auto operands = operands_of(call);
  const auto combine =
      reduction == kNone ? std::nullopt : std::optional(ReduceOp::kSum);
  const auto batch = letter_batch(line, operands[0], combine);
  set_dims(operands[1], batch);
  Result loss;
  if (reduction == kNone) {
    loss.dims = batch;
    loss.sizes = operands[1].spec->sizes;
  }
  Result total;
  total.constant = reduction == kNone;
  line.results = {loss, total};
  if (reduction == kMean) {
    line.kernel_when_contracted = LocalKernel::kNllLoss;
    line.kernel_edits = {{row.dims, {kSum}, true}};
    line.finished = true;
  }
  line.operands = std::move(operands);
  return line;
}

// (grad, scores, target, weight?, reduction, ignore_index, total_weight) ->
// gradient of the scores
Line nll_backward(const OpCall& call, int64_t reduction) {
  Line line;
  auto operands = operands_of(call);
  const auto batch = letter_batch(line, operands[1], std::nullopt);
  if (reduction == kNone) {
    set_dims(operands[0], batch);
  }
  set_dims(operands[2], batch);
  operands[4].shape_only = reduction != kMean;
  Result result;
  result.dims = operands[1].dims;
  result.sizes = operands[1].spec->sizes;
  line.results = {result};
  line.operands = std::move(operands);
  line.linear = {{0}};
  return line;
}

Line build_loss(const Row& row, const OpCall& call) {
  const int64_t reduction = call.args[static_cast<size_t>(row.dims)].integer;
  switch (row.mode) {
    case kForward:
      return elementwise_forward(row, call, reduction);
    case kBackward:
      return elementwise_backward(row, call, reduction);
    case kNll:
      return nll_forward(row, call, reduction);
    default:
      return nll_backward(call, reduction);
  }
}

} // namespace

const Table& loss_table() {
  static const Table table{"loss", build_loss, nullptr, kLossRows};
  return table;
}

} // namespace tessera::rules
