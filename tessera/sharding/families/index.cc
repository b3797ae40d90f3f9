// SPDX-License-Identifier: Apache-2.0
//
// Operators that pick, place or repeat along one dim. That dim stays whole;
// along the others they are pointwise.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>

#include <algorithm>

namespace tessera::rules {
namespace {

// Row::mode.
enum IndexMode : int {
  kGather, // the result has the sizes of the index
  kScatter, // the result has the sizes of self
  kSelect, // the index is a vector and takes the place of the dim
  kAdd, // the index is a vector; the source has the dims of self
  kTopk, // the result has the extent of argument 1 there
  kGrow, // gradient of a slice or of a selected element: the result has the
         // sizes of argument 1
  kPad, // pairs of paddings from the last dim on
  kRepeat
};

// Reads: ops, linear, dims (argument), decides, mode, results.
constexpr Row kIndexRows[] = {
    {.ops = "gather", .linear = "0", .dims = 1, .mode = kGather},
    {.ops = "scatter{.src,_.src}", .linear = "02", .dims = 1, .mode = kScatter},
    {.ops = "scatter{.value,_.value}", .dims = 1, .mode = kScatter},
    {.ops = "scatter_add{,_}", .linear = "02", .dims = 1, .mode = kScatter},
    {.ops = "index_select", .linear = "0", .dims = 1, .mode = kSelect},
    {.ops = "index_add{,_}", .linear = "02", .dims = 1, .mode = kAdd},
    {.ops = "topk", .dims = 2, .mode = kTopk, .results = 2},
    {.ops = "slice_backward", .linear = "0", .dims = 2, .mode = kGrow},
    {.ops = "select_backward", .linear = "0", .dims = 2, .mode = kGrow},
    {.ops = "constant_pad_nd", .linear = "0", .decides = 2, .mode = kPad},
    {.ops = "repeat", .linear = "0", .mode = kRepeat},
};

using Ints = std::vector<int64_t>;

Result result_of(const Ints& sizes, const std::vector<DimUse>& dims) {
  Result result;
  result.sizes = sizes;
  result.dims = dims;
  return result;
}

// Letters for the dims of the first operand other than `dim`, where every
// operand of the same rank is as long.
void letter_others(Line& line, size_t dim) {
  const size_t rank = line.operands[0].dims.size();
  for (size_t d = 0; d < rank; ++d) {
    const bool equal = std::all_of(
        line.operands.begin(),
        line.operands.end(),
        [&](const Operand& operand) {
          return operand.spec != nullptr && operand.dims.size() == rank &&
              operand.spec->sizes[d] == line.operands[0].spec->sizes[d];
        });
    if (d == dim || !equal) {
      continue;
    }
    const Letter letter = line.add_letter(line.operands[0].spec->sizes[d]);
    for (Operand& operand : line.operands) {
      operand.dims[d].letter = letter;
    }
  }
}

// Letters for the first operand alone, but not for `dim`.
void letter_first(Line& line, size_t dim) {
  Operand& first = line.operands[0];
  for (size_t d = 0; d < first.dims.size(); ++d) {
    if (d != dim) {
      first.dims[d].letter = line.add_letter(first.spec->sizes[d]);
    }
  }
}

Result picked(Line& line, const Row& row, const OpCall& call, size_t dim) {
  Operand& self = line.operands[0];
  Ints sizes = self.spec->sizes;
  switch (row.mode) {
    case kGather:
      letter_others(line, dim);
      return result_of(line.operands[1].spec->sizes, line.operands[1].dims);
    case kScatter:
      letter_others(line, dim);
      return result_of(sizes, self.dims);
    case kTopk: {
      letter_first(line, dim);
      if (!sizes.empty()) {
        sizes[dim] = call.args[1].integer;
      }
      return result_of(sizes, self.dims);
    }
    default: { // kSelect
      letter_first(line, dim);
      auto dims = self.dims;
      Operand& index = line.operands[1];
      if (!sizes.empty() && index.dims.size() == 1) {
        index.dims[0].letter = line.add_letter(index.spec->sizes[0]);
        dims[dim] = index.dims[0];
      }
      if (!sizes.empty()) {
        sizes[dim] = index.spec->numel();
      }
      return result_of(sizes, dims);
    }
  }
}

Result added(Line& line, size_t dim) {
  Operand& self = line.operands[0];
  Operand& source = line.operands[2];
  for (size_t d = 0;
       d < self.dims.size() && source.dims.size() == self.dims.size();
       ++d) {
    if (d != dim && self.spec->sizes[d] == source.spec->sizes[d]) {
      self.dims[d].letter = line.add_letter(self.spec->sizes[d]);
      source.dims[d] = self.dims[d];
    }
  }
  return result_of(self.spec->sizes, self.dims);
}

Result grown(Line& line, const Row& row, const OpCall& call) {
  const Ints& sizes = call.args[1].ints;
  const auto dim = static_cast<size_t>(wrap_dim(
      call,
      call.args[static_cast<size_t>(row.dims)].integer,
      static_cast<int64_t>(sizes.size())));
  Operand& grad = line.operands[0];
  std::vector<DimUse> dims(sizes.size());
  const bool gone = grad.dims.size() < sizes.size(); // select took the dim away
  for (size_t d = 0; d < sizes.size(); ++d) {
    const size_t from = gone && d > dim ? d - 1 : d;
    if (d == dim && (gone || grad.spec->sizes[from] != sizes[d])) {
      continue;
    }
    grad.dims[from].letter = line.add_letter(sizes[d]);
    dims[d] = grad.dims[from];
  }
  line.edits = {{1, LocalEdit::What::kSizes}};
  return result_of(sizes, dims);
}

Result padded(Line& line, const OpCall& call) {
  Operand& self = line.operands[0];
  const Ints& pads = call.args[1].ints;
  Ints sizes = self.spec->sizes;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const size_t pair = 2 * (sizes.size() - 1 - d);
    if (pair + 1 < pads.size() && (pads[pair] != 0 || pads[pair + 1] != 0)) {
      sizes[d] += pads[pair] + pads[pair + 1];
    } else {
      self.dims[d].letter = line.add_letter(sizes[d]);
    }
  }
  return result_of(sizes, self.dims);
}

Result repeated(Line& line, const OpCall& call) {
  Operand& self = line.operands[0];
  Ints sizes = call.args[1].ints;
  if (sizes.size() < self.dims.size()) {
    throw UsageError(fmt::format(
        "{}: {} repeats for {} dims; expected at least as many",
        call.op,
        sizes.size(),
        self.dims.size()));
  }
  std::vector<DimUse> dims(sizes.size());
  const size_t fresh = sizes.size() - self.dims.size();
  for (size_t d = 0; d < self.dims.size(); ++d) {
    if (sizes[fresh + d] == 1) {
      self.dims[d].letter = line.add_letter(self.spec->sizes[d]);
      dims[fresh + d] = self.dims[d];
    }
    sizes[fresh + d] *= self.spec->sizes[d];
  }
  return result_of(sizes, dims);
}

Line build_index(const Row& row, const OpCall& call) {
  Line line;
  line.operands = operands_of(call);
  const SpecPtr self = line.operands[0].spec;
  Result result;
  if (row.mode == kGrow) {
    result = grown(line, row, call);
  } else if (row.mode == kPad) {
    result = padded(line, call);
  } else if (row.mode == kRepeat) {
    result = repeated(line, call);
  } else {
    const auto dim = static_cast<size_t>(wrap_dim(
        call, call.args[static_cast<size_t>(row.dims)].integer, self->dim()));
    result = row.mode == kAdd ? added(line, dim) : picked(line, row, call, dim);
  }
  const OpArg* value =
      row.decides < 0 ? nullptr : &call.args[static_cast<size_t>(row.decides)];
  if (value == nullptr || (value->known && value->real == 0)) {
    set_linear(line, row.linear);
  }
  line.results.assign(
      line.operands[0].written ? 0 : static_cast<size_t>(row.results), result);
  return line;
}

// Reads: ops, mode (0: cat, 1: stack).
constexpr Row kJoinRows[] = {
    {.ops = "cat"},
    {.ops = "stack", .mode = 1},
};

// Old programs may cat an empty vector to anything.
bool is_skipped(const Operand& operand, size_t rank) {
  return rank != 1 && operand.spec->sizes == Ints{0};
}

Line build_join(const Row& row, const OpCall& call) {
  Line line;
  line.operands = operands_of(call);
  if (line.operands.empty()) {
    throw UsageError(fmt::format(
        "{}: got an empty list of tensors, expected at least one", call.op));
  }
  Ints sizes;
  for (const Operand& operand : line.operands) {
    if (sizes.empty() || operand.spec->sizes.size() > sizes.size()) {
      sizes = operand.spec->sizes;
    }
  }
  const size_t rank = sizes.size();
  const auto fresh = static_cast<int64_t>(row.mode == 1 ? 1 : 0);
  const auto dim = static_cast<size_t>(
      wrap_dim(call, call.args[1].integer, static_cast<int64_t>(rank) + fresh));
  std::vector<DimUse> dims(rank);
  for (size_t d = 0; d < rank; ++d) {
    if (row.mode == 1 || d != dim) {
      dims[d].letter = line.add_letter(sizes[d]);
    }
  }
  int64_t along = 0;
  for (Operand& operand : line.operands) {
    if (is_skipped(operand, rank)) {
      continue;
    }
    if (operand.spec->sizes.size() != rank) {
      throw UsageError(fmt::format(
          "{}: tensors of {} and {} dims; expected equal ones",
          call.op,
          rank,
          operand.spec->dim()));
    }
    operand.dims = dims;
    along += row.mode == 1 ? 1 : operand.spec->sizes[dim];
  }
  if (row.mode == 1) {
    sizes.insert(sizes.begin() + static_cast<std::ptrdiff_t>(dim), along);
    dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(dim), DimUse());
  } else if (rank > 0) {
    sizes[dim] = along;
  }
  std::vector<int> all(line.operands.size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<int>(i);
  }
  line.linear = {all};
  line.results = {result_of(sizes, dims)};
  return line;
}

} // namespace

const Table& index_table() {
  static const Table table{"index", build_index, nullptr, kIndexRows};
  return table;
}

const Table& join_table() {
  static const Table table{"join", build_join, nullptr, kJoinRows};
  return table;
}

} // namespace tessera::rules
