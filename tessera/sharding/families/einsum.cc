// SPDX-License-Identifier: Apache-2.0
//
// Operators whose dims say everything. The notation of a row has one item per
// tensor argument in schema order, then one per result; each letter is a dim:
// mk,kn->mn.
//
// clang-format off
//   a     a letter: may be cut
//   A     stays whole
//   h, g  heads of queries and of keys: one letter of g's extent, of which a
//         step is as many dims of h as queries share a key
//   ...   any number of leading dims, a letter each, the same in all items
//   *     as many trailing dims as the list argument `dims` is long, all whole
//   -     as many dims of extent 1 as * has
//   1     a dim of extent 1
//   _     whole whatever its rank; a result so marked is the same on all ranks
//         and only the local result knows its sizes
//   +x    a term of the sum over contracted letters, broadcast from the right
//         (a bias)
//   ~x    broadcast from the right (a mask)
//   x@y   the result lies in memory in the order of dims y, outermost first;
//         x@0: in the order of the first operand's dims
// clang-format on
//
// A letter that a result lacks is contracted: the results are sums. A letter
// that stands in results only is as long as the integer argument `dims` says;
// where that is no integer, only the local result knows.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/sharding/families.h>

#include <algorithm>
#include <map>
#include <string>

namespace tessera::rules {
namespace {

// Row::mode: the bool argument of this schema position, when true, forbids that
// indices are cut; 0 for none. Reads: ops, notation, linear, dims, mode,
// zeros_if_empty, results (0: none; else the notation counts).
constexpr Row kEinsumRows[] = {
    // Matrix products.
    {.ops = "mm{,.out}", .notation = "mk,kn->mn", .linear = "0,1"},
    {.ops = "addmm{,_,.out}", .notation = "+mn,mk,kn->mn", .linear = "01,02"},
    {.ops = "bmm{,.out}", .notation = "bmk,bkn->bmn", .linear = "0,1"},
    {.ops = "baddbmm{,_,.out}",
     .notation = "+bmn,bmk,bkn->bmn",
     .linear = "01,02"},
    {.ops = "addbmm{,_,.out}",
     .notation = "+mn,bmk,bkn->mn",
     .linear = "01,02"},
    {.ops = "mv{,.out}", .notation = "mk,k->m", .linear = "0,1"},
    {.ops = "addmv{,_,.out}", .notation = "+m,mk,k->m", .linear = "01,02"},
    {.ops = "addr{,_,.out}", .notation = "+mn,m,n->mn", .linear = "01,02"},
    {.ops = "dot{,.out}", .notation = "k,k->", .linear = "0,1"},
    {.ops = "vdot", .notation = "k,k->", .linear = "0,1"},
    {.ops = "linear{,.out}", .notation = "...k,nk,+n->...n", .linear = "02,12"},

    // Tables of vectors.
    {.ops = "embedding", .notation = "Vd,...->...d", .linear = "0"},
    {.ops = "embedding_dense_backward",
     .notation = "...d,...->Vd",
     .linear = "0",
     .dims = 2,
     .mode = 4},

    // Normalisation over the trailing dims.
    {.ops = "native_layer_norm",
     .notation = "...*,~*,~*->...*,...-,...-",
     .dims = 1},
    {.ops = "native_layer_norm_backward",
     .notation = "...*,...*,...-,...-,~*,~*->...*,*,*",
     .linear = "0",
     .dims = 2},
    {.ops = "_fused_rms_norm", .notation = "...*,~*->...*,...-", .dims = 1},
    {.ops = "_fused_rms_norm_backward",
     .notation = "...*,...*,...-,~*->...*,*",
     .linear = "0",
     .dims = 2},
    {.ops = "rms_norm", .notation = "...*,~*->...*", .dims = 1},

    // Attention: query, key, value, then what the kernels differ in.
    {.ops = "_scaled_dot_product_flash_attention_for_cpu",
     .notation = "bhLE,bgSE,bgSF,~bhLS->bhLF@0,bhL@bLh",
     .zeros_if_empty = true},
    {.ops = "_scaled_dot_product_flash_attention_for_cpu_backward",
     .notation =
         "bhLF,bhLE,bgSE,bgSF,bhLF,bhL,~bhLS->bhLE@bLhE,bgSE@bSgE,bgSF@bSgF",
     .linear = "0",
     .zeros_if_empty = true},
    {.ops = "_scaled_dot_product_flash_attention",
     .notation = "bhLE,bgSE,bgSF->bhLF@0,bhL,_,_,_,_,_"},
    {.ops = "_scaled_dot_product_flash_attention_backward",
     .notation =
         "bhLF,bhLE,bgSE,bgSF,bhLF,bhL,_,_,_,_->bhLE@bLhE,bgSE@bSgE,bgSF@bSgF",
     .linear = "0"},
    {.ops = "_scaled_dot_product_efficient_attention",
     .notation = "bhLE,bgSE,bgSF,~bhLS->bhLF@bLhF,bhU,_,_"},
    {.ops = "_scaled_dot_product_efficient_attention_backward",
     .notation = "bhLF,bhLE,bgSE,bgSF,~bhLS,bhLF,bhU,_,_->bhLE@bLhE,bgSE@bSgE,"
                 "bgSF@bSgF,bhLS",
     .linear = "0"},
    {.ops = "_scaled_dot_product_cudnn_attention",
     .notation = "bhLE,bgSE,bgSF,~bhLS->bhLF@0,bhU1,_,_,_,_,_"},
    {.ops = "_scaled_dot_product_cudnn_attention_backward",
     .notation = "bhLF,bhLE,bgSE,bgSF,bhLF,bhU1,_,_,~bhLS,_,_->bhLE@bLhE,bgSE@"
                 "bSgE,bgSF@bSgF",
     .linear = "0"},

    // Values that leave the tensor world.
    {.ops = "_local_scalar_dense", .notation = "_->", .results = 0},
    {.ops = "item", .notation = "_->", .results = 0},
    {.ops = "is_nonzero", .notation = "_->", .results = 0},
    {.ops = "equal", .notation = "_,_->", .results = 0},
    {.ops = "allclose", .notation = "_,_->", .results = 0},
};

// A dim of an item after "...", * and - are spelled out.
using Symbol = int;
constexpr Symbol kOne = -1; // extent 1
constexpr Symbol kTrailing = 1000; // kTrailing + i: dim i of *
constexpr Symbol kLeading = 2000; // kLeading + i: dim i of "..."

bool is_letter(Symbol symbol) {
  return symbol >= kLeading || (symbol >= 'a' && symbol <= 'z');
}

struct Item {
  std::string_view dims;
  std::string_view order; // after @
  bool additive = false;
  bool broadcast = false;
  bool anything = false; // _
};

Item parse_item(std::string_view text) {
  Item item;
  const size_t at = text.find('@');
  if (at != std::string_view::npos) {
    item.order = text.substr(at + 1);
    text = text.substr(0, at);
  }
  if (!text.empty() && (text.front() == '+' || text.front() == '~')) {
    item.additive = text.front() == '+';
    item.broadcast = true;
    text.remove_prefix(1);
  }
  item.anything = text == "_";
  item.dims = text;
  return item;
}

std::vector<Item> parse_items(std::string_view text) {
  std::vector<Item> items;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    items.push_back(parse_item(text.substr(0, comma)));
    text = comma == std::string_view::npos ? std::string_view()
                                           : text.substr(comma + 1);
  }
  return items;
}

class Einsum {
 public:
  Einsum(const Row& row, const OpCall& call) : row_(&row), call_(&call) {
    const size_t arrow = row.notation.find("->");
    arguments_ = parse_items(row.notation.substr(0, arrow));
    results_ = parse_items(row.notation.substr(arrow + 2));
    if (results_.empty() && row.results > 0) {
      results_.push_back(Item()); // 0-d
    }
    line_.operands = operands_of(call);
    if (line_.operands.size() < arguments_.size()) {
      throw UsageError(fmt::format(
          "{}: got {} tensors, expected {}",
          call.op,
          line_.operands.size(),
          arguments_.size()));
    }
    count_dims();
    measure();
    make_letters();
  }

  Line build() {
    bool writes = false;
    for (size_t i = 0; i < line_.operands.size(); ++i) {
      Operand& operand = line_.operands[i];
      writes = writes || operand.written;
      if (operand.spec == nullptr) {
        continue;
      }
      const bool receives = i >= arguments_.size();
      const Item& item =
          receives ? results_[i - arguments_.size()] : arguments_[i];
      operand.additive = item.additive;
      operand.shape_only = receives;
      if (!item.anything) {
        set_dims(operand, item);
      }
    }
    for (const Item& item : writes ? std::vector<Item>() : results_) {
      line_.results.push_back(result(item));
    }
    set_linear(line_, row_->linear);
    line_.kernel =
        row_->zeros_if_empty ? LocalKernel::kZerosIfEmpty : LocalKernel::kOp;
    return std::move(line_);
  }

 private:
  // How many dims "..." and * stand for.
  void count_dims() {
    if (row_->notation.find('*') != std::string_view::npos) {
      trailing_ = static_cast<int>(
          call_->args[static_cast<size_t>(row_->dims)].ints.size());
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Item& item = arguments_[i];
      if (line_.operands[i].spec != nullptr && !item.broadcast &&
          item.dims.starts_with("...")) {
        const auto rank = static_cast<int>(line_.operands[i].spec->dim());
        leading_ = std::max(0, rank - static_cast<int>(spell(item).size()));
        return;
      }
    }
  }

  std::vector<Symbol> spell(const Item& item) const {
    std::vector<Symbol> symbols;
    std::string_view text = item.dims;
    if (text.starts_with("...")) {
      for (int i = 0; i < leading_; ++i) {
        symbols.push_back(kLeading + i);
      }
      text.remove_prefix(3);
    }
    for (const char c : text) {
      for (int i = 0; i < (c == '*' || c == '-' ? trailing_ : 1); ++i) {
        symbols.push_back(
            c == '*'                   ? kTrailing + i
                : c == '-' || c == '1' ? kOne
                                       : static_cast<Symbol>(c));
      }
    }
    return symbols;
  }

  // The symbols of an operand's own dims: fewer than its item's when it is
  // broadcast.
  std::vector<Symbol> spell(const Item& item, const TensorSpec& spec) const {
    std::vector<Symbol> symbols = spell(item);
    const auto rank = static_cast<size_t>(spec.dim());
    if (item.broadcast && rank < symbols.size()) {
      symbols.erase(
          symbols.begin(), symbols.end() - static_cast<std::ptrdiff_t>(rank));
    }
    if (rank != symbols.size()) {
      throw UsageError(fmt::format(
          "{}: a tensor has {} dims, expected {}",
          call_->op,
          rank,
          symbols.size()));
    }
    return symbols;
  }

  void measure() {
    measure_arguments(false);
    measure_arguments(true);
    for (const Item& item :
         results_) { // extents that an argument gives, or nobody
      for (const Symbol symbol :
           item.anything ? std::vector<Symbol>() : spell(item)) {
        const OpArg* arg = row_->dims < 0
            ? nullptr
            : &call_->args[static_cast<size_t>(row_->dims)];
        extents_.emplace(
            symbol,
            arg != nullptr && arg->kind == OpArg::Kind::kInt ? arg->integer
                                                             : -1);
      }
    }
    extents_[kOne] = 1;
  }

  void measure_arguments(bool broadcast) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const SpecPtr spec = line_.operands[i].spec;
      if (spec == nullptr || arguments_[i].anything ||
          arguments_[i].broadcast != broadcast) {
        continue;
      }
      const auto symbols = spell(arguments_[i], *spec);
      for (size_t d = 0; d < symbols.size(); ++d) {
        measure(arguments_[i], symbols[d], spec->sizes[d]);
      }
    }
  }

  void measure(const Item& item, Symbol symbol, int64_t extent) {
    const auto [known, fresh] = extents_.emplace(symbol, extent);
    if (!fresh && known->second != extent && symbol != kOne &&
        !(item.broadcast && extent == 1)) {
      throw UsageError(fmt::format(
          "{}: sizes {} and {} of one dim do not match ({})",
          call_->op,
          known->second,
          extent,
          row_->notation));
    }
  }

  void make_letters() {
    const bool no_index_cut = row_->mode > 0 &&
        call_->args[static_cast<size_t>(row_->mode)].integer != 0;
    for (const auto& [symbol, extent] : extents_) {
      if (is_letter(symbol) && !(no_index_cut && symbol >= kLeading)) {
        uses_[symbol] = {line_.add_letter(extent, ReduceOp::kSum), 1};
        line_.letters.back().never_empty =
            !row_->zeros_if_empty && (symbol == 'g' || symbol == 'h');
      }
    }
    if (uses_.contains('g') && uses_.contains('h')) {
      const bool whole =
          extents_['g'] > 0 && extents_['h'] % extents_['g'] == 0;
      uses_['h'] = whole
          ? DimUse{uses_['g'].letter, extents_['h'] / extents_['g']}
          : DimUse();
    }
  }

  DimUse use(Symbol symbol) const {
    const auto found = uses_.find(symbol);
    return found == uses_.end() ? DimUse() : found->second;
  }

  void set_dims(Operand& operand, const Item& item) const {
    if (operand.shape_only && spell(item).size() != operand.dims.size()) {
      return; // a result that will be resized
    }
    const auto symbols = spell(item, *operand.spec);
    for (size_t d = 0; d < symbols.size(); ++d) {
      const bool broadcast = operand.spec->sizes[d] != extents_.at(symbols[d]);
      operand.dims[d] = broadcast ? DimUse() : use(symbols[d]);
    }
  }

  Result result(const Item& item) const {
    Result result;
    if (item.anything) {
      result.constant = true;
      result.sizes_known = false;
      return result;
    }
    for (const Symbol symbol : spell(item)) {
      result.dims.push_back(use(symbol));
      result.sizes.push_back(extents_.at(symbol));
      result.sizes_known = result.sizes_known && result.sizes.back() >= 0;
    }
    if (!item.order.empty() && result.sizes_known) {
      result.strides = strides_in_order(item, result.sizes);
    }
    return result;
  }

  std::vector<int64_t> strides_in_order(
      const Item& item, const std::vector<int64_t>& sizes) const {
    std::vector<int64_t> rank(sizes.size()); // larger lies further out
    for (size_t d = 0; d < sizes.size(); ++d) {
      rank[d] = static_cast<int64_t>(
          item.order.size() - item.order.find(item.dims[d]));
    }
    const auto strides = dense_strides(
        sizes, item.order == "0" ? line_.operands[0].spec->strides : rank);
    return strides == contiguous_strides(sizes) ? std::vector<int64_t>()
                                                : strides;
  }

  const Row* row_;
  const OpCall* call_;
  Line line_;
  std::vector<Item> arguments_;
  std::vector<Item> results_;
  int trailing_ = 0;
  int leading_ = 0;
  std::map<Symbol, int64_t> extents_;
  std::map<Symbol, DimUse> uses_;
};

Line build_einsum(const Row& row, const OpCall& call) {
  return Einsum(row, call).build();
}

} // namespace

const Table& einsum_table() {
  static const Table table{"einsum", build_einsum, nullptr, kEinsumRows};
  return table;
}

} // namespace tessera::rules
