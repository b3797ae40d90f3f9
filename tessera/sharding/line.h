// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/decision.h>
#include <tessera/sharding/op_call.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::rules {

// An index into Line::letters, or kWhole for a dim that every rank needs whole.
using Letter = int;
constexpr Letter kWhole = -1;

// What a dim of a tensor is to the call: a letter, of which each step is
// `scale` elements of the dim.
struct DimUse {
  Letter letter = kWhole;
  int64_t scale = 1;
};

struct LetterInfo {
  int64_t extent = 1;
  // How the contributions of ranks combine in results that lack the letter;
  // none: such a letter cannot be cut.
  std::optional<ReduceOp> reduction;
  // The operator fails on none of it: every rank must get something.
  bool never_empty = false;
};

// One tensor argument. Lines hold one for each entry of Decision::inputs.
struct Operand {
  SpecPtr spec = nullptr; // as the call has it; null for absent ones
  std::vector<DimUse> dims;
  bool additive = false; // one term of the sum (a bias): Partial(sum) when the
                         // line's letter is contracted
  bool written = false;
  bool out = false; // only receives results: no part in shapes
  bool shape_only = false; // its values are not read: it needs no reduction
  bool untouched = false; // nor is its shape: it stays as it is
};

struct Result {
  std::vector<DimUse> dims;
  std::vector<int64_t> sizes; // global
  std::vector<int64_t> strides; // global; empty: contiguous
  bool sizes_known = true;
  bool constant =
      false; // the same on every rank whatever is cut (seeds of random numbers)
};

// An argument of the local call that takes this rank's value of something that
// result 0 has globally.
struct LocalEdit {
  enum class What : uint8_t { kSizes, kStrides };
  int64_t arg;
  What what;
};

// What a call does to the dims of its tensors, from which all its strategies
// follow. See propagate.cc.
struct Line {
  std::vector<LetterInfo> letters;
  std::vector<Operand> operands;
  std::vector<Result> results; // those that are no written arguments
  std::vector<std::vector<int>>
      linear; // groups of operands in which the call is jointly linear
  bool any_partial =
      false; // the linear groups pass every reduction, not only sum and avg
  LocalKernel kernel = LocalKernel::kOp;
  LocalKernel kernel_when_contracted =
      LocalKernel::kOp; // where a letter with a reduction is cut
  std::vector<ArgEdit> kernel_edits; // that go with a kernel other than kOp
  bool finished = false; // the kernel has a finishing part: contributions are
                         // reduced right after it
  std::vector<int64_t> numbers;
  std::vector<LocalEdit> edits;
  bool is_view = false;
  bool fallback = false;

  Letter add_letter(
      int64_t extent, std::optional<ReduceOp> reduction = std::nullopt);
};

// The operands of a call in the order of Decision::inputs, with no dim lettered
// yet.
std::vector<Operand> operands_of(const OpCall& call);

// Every tensor replicated.
Line replicate(const OpCall& call);

// The strides that TensorIterator gives a fresh result: the operands' common
// order of dims, dense. Empty when contiguous.
std::vector<int64_t> iterator_strides(
    const std::vector<int64_t>& sizes, const std::vector<SpecPtr>& operands);

// Dense strides whose order of dims is that of `like`, for other sizes of the
// same rank.
std::vector<int64_t> dense_strides(
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& like);

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);

// A dim counted from the end made non-negative. Throws UsageError when out of
// range.
int64_t wrap_dim(const OpCall& call, int64_t dim, int64_t rank);

} // namespace tessera::rules
