// SPDX-License-Identifier: Apache-2.0
//
// Views: every dim of the result is a dim of the input, or a part or product of
// some. All of them pass every Partial.
//
// A reshape falls into groups of input dims that make up groups of result dims
// with the same number of elements. In a group only the leading dims can be
// cut: the letter is as long as both leading dims have a common divisor, so
// that each of its steps is one stretch of memory.
#include <ATen/TensorUtils.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace tessera::rules {
namespace {

// Row::mode.
enum ViewMode : int {
  kAlias,
  kReshape,
  kReshapeAlias, // with strides that the caller worked out
  kExpand,
  kTranspose,
  kT,
  kPermute,
  kSlice,
  kSelect,
  kSplit, // into pieces of one size
  kSplitSizes,
  kUnbind,
  kUnsqueeze,
  kSqueeze, // dims: the argument that names them, or all
  kDiagonal,
  kUnfold,
  kStrided // as_strided: any view of memory at all, so nothing is cut
};

// Reads: ops, dims (the argument with sizes or dims), mode, results (0: the
// result is no alias by schema).
constexpr Row kViewRows[] = {
    {.ops = "alias", .mode = kAlias},
    {.ops = "detach", .mode = kAlias},
    {.ops = "lift_fresh", .mode = kAlias},
    {.ops = "lift", .mode = kAlias, .results = 0},
    {.ops = "view", .dims = 1, .mode = kReshape},
    {.ops = "reshape", .dims = 1, .mode = kReshape},
    {.ops = "_unsafe_view", .dims = 1, .mode = kReshape, .results = 0},
    {.ops = "_reshape_alias", .dims = 1, .mode = kReshapeAlias},
    {.ops = "expand", .dims = 1, .mode = kExpand},
    {.ops = "transpose.int", .mode = kTranspose},
    {.ops = "t", .mode = kT},
    {.ops = "permute", .dims = 1, .mode = kPermute},
    {.ops = "slice.Tensor", .dims = 1, .mode = kSlice},
    {.ops = "select.int", .dims = 1, .mode = kSelect},
    {.ops = "split.Tensor", .dims = 2, .mode = kSplit},
    {.ops = "split_with_sizes", .dims = 2, .mode = kSplitSizes},
    {.ops = "unbind.int", .dims = 1, .mode = kUnbind},
    {.ops = "unsqueeze", .dims = 1, .mode = kUnsqueeze},
    {.ops = "squeeze", .mode = kSqueeze},
    {.ops = "squeeze{.dim,.dims}", .dims = 1, .mode = kSqueeze},
    {.ops = "diagonal", .mode = kDiagonal},
    {.ops = "unfold", .dims = 1, .mode = kUnfold},
    {.ops = "as_strided", .dims = 1, .mode = kStrided},
};

using Ints = std::vector<int64_t>;

// A view in the making: the input's letters and the results so far.
class View {
 public:
  View(const Row& row, const OpCall& call) : row_(&row), call_(&call) {
    line_.operands = operands_of(call);
    line_.linear = {{0}};
    line_.any_partial = true;
    line_.is_view = row.results > 0;
    sizes_ = line_.operands[0].spec->sizes;
    strides_ = line_.operands[0].spec->strides;
  }

  Line build();

 private:
  const OpArg& arg(size_t position) const {
    return call_->args[position];
  }
  int64_t rank() const {
    return static_cast<int64_t>(sizes_.size());
  }
  size_t dim_arg(size_t position, int64_t extra_rank = 0) const {
    return static_cast<size_t>(
        wrap_dim(*call_, arg(position).integer, rank() + extra_rank));
  }

  // Gives the input's dim a letter of its own.
  DimUse letter(size_t dim) {
    DimUse& use = line_.operands[0].dims[dim];
    if (use.letter == kWhole) {
      use = {line_.add_letter(sizes_[dim]), 1};
    }
    return use;
  }
  static void push(Result& result, DimUse use, int64_t size, int64_t stride) {
    result.dims.push_back(use);
    result.sizes.push_back(size);
    result.strides.push_back(stride);
  }
  void push(Result& result, size_t dim) {
    push(result, letter(dim), sizes_[dim], strides_[dim]);
  }
  void take(const std::vector<size_t>& dims) {
    Result result;
    for (const size_t dim : dims) {
      push(result, dim);
    }
    line_.results.push_back(std::move(result));
  }
  std::vector<size_t> all_dims() const {
    std::vector<size_t> dims(sizes_.size());
    std::iota(dims.begin(), dims.end(), size_t{0});
    return dims;
  }

  void reshape(const Ints& asked);
  void pair_groups(const Ints& to, std::vector<DimUse>& uses);
  void link(
      size_t from_begin,
      size_t from_end,
      size_t to_begin,
      size_t to_end,
      const Ints& to,
      std::vector<DimUse>& uses);
  void expand();
  void permute();
  void slice();
  void select();
  void split(const Ints& pieces, size_t dim);
  void unsqueeze();
  void squeeze();
  void diagonal();
  void unfold();
  void as_strided();

  const Row* row_;
  const OpCall* call_;
  Line line_;
  Ints sizes_;
  Ints strides_;
};

// The sizes asked for, with -1 worked out.
Ints resolve(const OpCall& call, Ints asked, int64_t numel) {
  int64_t rest = 1;
  int64_t* open = nullptr;
  for (int64_t& size : asked) {
    if (size == -1) {
      open = &size;
    } else {
      rest *= size;
    }
  }
  if (open != nullptr && rest > 0) {
    *open = numel / rest;
  }
  const int64_t product = std::accumulate(
      asked.begin(), asked.end(), int64_t{1}, std::multiplies<>());
  if (product != numel) {
    throw UsageError(fmt::format(
        "{}: [{}] for a tensor of {} elements; the product must be equal",
        call.op,
        fmt::join(asked, ", "),
        numel));
  }
  return asked;
}

void View::reshape(const Ints& asked) {
  const int64_t numel = line_.operands[0].spec->numel();
  const Ints to = resolve(*call_, asked, numel);
  Result result;
  result.sizes = to;
  result.dims.resize(to.size());
  if (numel > 0) {
    pair_groups(to, result.dims);
  }
  if (row_->mode == kReshapeAlias) {
    result.strides = arg(2).ints;
    line_.kernel = LocalKernel::kView;
  } else {
    const auto strides = at::detail::computeStride(sizes_, strides_, to);
    result.strides = strides ? *strides : Ints();
    line_.edits = {{row_->dims, LocalEdit::What::kSizes}};
  }
  line_.results.push_back(std::move(result));
}

void View::pair_groups(const Ints& to, std::vector<DimUse>& uses) {
  size_t i = 0;
  size_t j = 0;
  while (i < sizes_.size() && j < to.size()) {
    const size_t from_begin = i;
    const size_t to_begin = j;
    int64_t from_product = sizes_[i++];
    int64_t to_product = to[j++];
    while (from_product != to_product) {
      if (from_product < to_product) {
        from_product *= sizes_[i++];
      } else {
        to_product *= to[j++];
      }
    }
    link(from_begin, i, to_begin, j, to, uses);
  }
}

size_t leading(const Ints& sizes, size_t begin, size_t end) {
  while (begin + 1 < end && sizes[begin] == 1) {
    ++begin;
  }
  return begin;
}

// One group: gives the leading dims of both sides a letter.
void View::link(
    size_t from_begin,
    size_t from_end,
    size_t to_begin,
    size_t to_end,
    const Ints& to,
    std::vector<DimUse>& uses) {
  const size_t from = leading(sizes_, from_begin, from_end);
  const size_t into = leading(to, to_begin, to_end);
  const int64_t steps = std::gcd(sizes_[from], to[into]);
  const bool alone = from_end - from_begin == 1 && to_end - to_begin == 1;
  if (steps > 1 || alone) {
    const Letter letter = line_.add_letter(steps);
    line_.operands[0].dims[from] = {letter, sizes_[from] / steps};
    uses[into] = {letter, to[into] / steps};
  }
}

void View::expand() {
  const Ints& asked = arg(static_cast<size_t>(row_->dims)).ints;
  if (asked.size() < sizes_.size()) {
    throw UsageError(fmt::format(
        "{}: {} sizes for a tensor of {} dims; expected at least as many",
        call_->op,
        asked.size(),
        rank()));
  }
  const size_t fresh = asked.size() - sizes_.size();
  Result result;
  for (size_t d = 0; d < asked.size(); ++d) {
    if (d >= fresh && (asked[d] == -1 || asked[d] == sizes_[d - fresh])) {
      push(result, d - fresh);
    } else {
      push(result, DimUse(), asked[d], 0);
    }
  }
  line_.edits = {{row_->dims, LocalEdit::What::kSizes}};
  line_.results.push_back(std::move(result));
}

void View::permute() {
  std::vector<size_t> dims = all_dims();
  if (row_->mode == kPermute) {
    dims.clear();
    for (const int64_t dim : arg(static_cast<size_t>(row_->dims)).ints) {
      dims.push_back(static_cast<size_t>(wrap_dim(*call_, dim, rank())));
    }
  } else if (rank() > 1) {
    std::swap(
        dims[row_->mode == kT ? 0 : dim_arg(1)],
        dims[row_->mode == kT ? 1 : dim_arg(2)]);
  }
  take(dims);
}

// A bound of a slice made non-negative and brought into range.
int64_t clamp_bound(int64_t bound, int64_t extent) {
  return std::clamp<int64_t>(bound < 0 ? bound + extent : bound, 0, extent);
}

void View::slice() {
  const size_t dim = dim_arg(1);
  const int64_t extent = sizes_[dim];
  const int64_t start = clamp_bound(
      arg(2).kind == OpArg::Kind::kInt ? arg(2).integer : 0, extent);
  const int64_t asked = arg(3).kind == OpArg::Kind::kInt
      ? arg(3).integer
      : std::numeric_limits<int64_t>::max();
  const int64_t end = std::max(start, clamp_bound(asked, extent));
  const int64_t step = arg(4).integer;
  Result result;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (d != dim || (start == 0 && end == extent && step == 1)) {
      push(result, d); // all of it: bounds past the end of a shard mean its end
    } else {
      push(
          result,
          DimUse(),
          (end - start + step - 1) / step,
          strides_[d] * step);
    }
  }
  line_.results.push_back(std::move(result));
}

void View::select() {
  std::vector<size_t> dims = all_dims();
  dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(dim_arg(1)));
  take(dims);
}

void View::split(const Ints& pieces, size_t dim) {
  for (const int64_t piece : pieces) {
    Result result;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      if (d == dim) {
        push(result, DimUse(), piece, strides_[d]);
      } else {
        push(result, d);
      }
    }
    line_.results.push_back(std::move(result));
  }
}

Ints equal_pieces(int64_t extent, int64_t size) {
  Ints pieces;
  for (int64_t begin = 0; begin < extent; begin += std::max<int64_t>(size, 1)) {
    pieces.push_back(std::min(size, extent - begin));
  }
  return pieces.empty() ? Ints{0} : pieces;
}

void View::unsqueeze() {
  const size_t dim = dim_arg(1, 1);
  Result result;
  for (size_t d = 0; d <= sizes_.size(); ++d) {
    if (d == dim) {
      push(
          result, DimUse(), 1, d < sizes_.size() ? sizes_[d] * strides_[d] : 1);
    }
    if (d < sizes_.size()) {
      push(result, d);
    }
  }
  line_.results.push_back(std::move(result));
}

void View::squeeze() {
  std::vector<bool> named(sizes_.size(), row_->dims < 0);
  if (row_->dims >= 0) {
    const OpArg& dims = arg(static_cast<size_t>(row_->dims));
    for (const int64_t dim :
         dims.kind == OpArg::Kind::kInt ? Ints{dims.integer} : dims.ints) {
      if (rank() > 0) {
        named[static_cast<size_t>(wrap_dim(*call_, dim, rank()))] = true;
      }
    }
  }
  std::vector<size_t> kept;
  for (const size_t d : all_dims()) {
    if (!named[d] || sizes_[d] != 1) {
      kept.push_back(d);
    }
  }
  take(kept);
  line_.kernel = LocalKernel::kView; // squeeze itself would take dims of which
                                     // a shard has one element
}

void View::diagonal() {
  const size_t first = dim_arg(2);
  const size_t second = dim_arg(3);
  const int64_t offset = arg(1).integer;
  Result result;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (d != first && d != second) {
      push(result, d);
    }
  }
  const int64_t length = offset >= 0
      ? std::min(sizes_[first], sizes_[second] - offset)
      : std::min(sizes_[first] + offset, sizes_[second]);
  push(
      result,
      DimUse(),
      std::max<int64_t>(length, 0),
      strides_[first] + strides_[second]);
  line_.results.push_back(std::move(result));
}

void View::unfold() {
  const size_t dim = dim_arg(1);
  const int64_t size = arg(2).integer;
  const int64_t step = arg(3).integer;
  Result result;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (d == dim) {
      push(result, DimUse(), (sizes_[d] - size) / step + 1, strides_[d] * step);
    } else {
      push(result, d);
    }
  }
  push(result, DimUse(), size, sizes_.empty() ? 1 : strides_[dim]);
  line_.results.push_back(std::move(result));
}

void View::as_strided() {
  Result result;
  result.sizes = arg(1).ints;
  result.strides = arg(2).ints;
  result.dims.resize(result.sizes.size());
  line_.results.push_back(std::move(result));
}

Line View::build() {
  switch (row_->mode) {
    case kAlias:
      take(all_dims());
      break;
    case kReshape:
    case kReshapeAlias:
      reshape(arg(static_cast<size_t>(row_->dims)).ints);
      break;
    case kExpand:
      expand();
      break;
    case kTranspose:
    case kT:
    case kPermute:
      permute();
      break;
    case kSlice:
      slice();
      break;
    case kSelect:
      select();
      break;
    case kSplit:
      split(equal_pieces(sizes_[dim_arg(2)], arg(1).integer), dim_arg(2));
      break;
    case kSplitSizes:
      split(arg(1).ints, dim_arg(2));
      break;
    case kUnbind: {
      std::vector<size_t> dims = all_dims();
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(dim_arg(1)));
      for (int64_t i = 0; i < sizes_[dim_arg(1)]; ++i) {
        take(dims);
      }
      break;
    }
    case kUnsqueeze:
      unsqueeze();
      break;
    case kSqueeze:
      squeeze();
      break;
    case kDiagonal:
      diagonal();
      break;
    case kUnfold:
      unfold();
      break;
    default:
      as_strided();
  }
  return std::move(line_);
}

Line build_view(const Row& row, const OpCall& call) {
  return View(row, call).build();
}

} // namespace

const Table& view_table() {
  static const Table table{"view", build_view, nullptr, kViewRows};
  return table;
}

} // namespace tessera::rules
