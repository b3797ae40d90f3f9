// SPDX-License-Identifier: Apache-2.0
//
// How a call's placements are decided.
//
// A rule turns a call into a Line: every dim of every operand and result is
// either a letter or whole (no rank can do with a part of it). Dims with the
// same letter are cut together. `addmm` has the line +mn,mk,kn->mn. From a line
// all strategies for ONE mesh axis follow:
//
//  1. Everything is replicated.
//  2. One letter is cut. Operands that have it are Shard there, the others
//  Replicate. Results that have it are Shard. A result that
//     lacks it is a contribution, Partial with the letter's reduction (k of
//     addmm: sum); letters without a reduction cannot be cut then. A bias is a
//     term of that sum and must be counted once: it becomes Partial(sum) as
//     well.
//  3. The call is linear in a group of operands: they are Partial(sum) or all
//  Partial(avg), the others Replicate, and so are the results
//     Partial. Joint linearity matters: a+b is linear in (a,b) but not in a
//     alone, a*b is linear in a and in b but not in both.
//
// A letter is cut into steps of the unit that some operand already uses, or
// of 1. Views make dims that are several steps of a letter long
// (`DimUse::scale`): flattening [6,256] is the line a,?->a with 256 elements a
// step, and Shard(0) becomes Shard(0, unit 256), which is the same memory.
// Hence boundaries agree on all operands by construction, however uneven the
// chunks are.
//
// Not every strategy is worth a look. Where all operands are replicated on an
// axis, cutting something would cost little and be regretted later, so only 1
// remains. Letters that no operand has cut come in only when some operand must
// move anyway (it is Partial, or cut along a whole dim). Staying Partial is
// only for calls that need no communication for it: nothing may be gathered for
// its sake. New cuts must give every rank something.
//
// On an n-d mesh the strategies are the product over the axes. Each is priced:
// the redistribution of every operand, of written operands back to where they
// were, and of contributions that the kernel must finish (the root of a norm).
// The cheapest wins; then the one that changes fewest placements, then the one
// with most results sharded, then the first. All of it depends on global shapes
// and specs alone, so all ranks decide alike. When there are too many
// combinations, each axis first keeps those that are cheapest by themselves.

#include <tessera/sharding/families.h>
#include <tessera/sharding/line.h>
#include <tessera/sharding/propagate.h>
#include <tessera/sharding/redistribution.h>
#include <tessera/sharding/strategies.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace tessera {
namespace rules {
namespace {

constexpr size_t kMostCombinations = 256;

// One strategy per axis.
using Combination = std::vector<const AxisStrategy*>;

struct Price {
  double us = 0;
  int changed = 0;
  int sharded = 0;

  bool better_than(const Price& other) const {
    const double slack = 1e-9 * (1 + std::abs(us));
    if (us < other.us - slack || us > other.us + slack) {
      return us < other.us;
    }
    return changed != other.changed ? changed < other.changed
                                    : sharded > other.sharded;
  }
};

// Specs and costs of moving one tensor, each asked for many times during a
// search.
class Mover {
 public:
  Mover(SpecPtr spec, const CostModel& costs) : spec_(spec), costs_(&costs) {}

  struct Move {
    Placements placements;
    SpecPtr spec;
    double there = -1; // microseconds; negative: not asked for yet
    double back = -1;
  };

  Move& to(const Placements& placements) {
    for (Move& move : moves_) {
      if (move.placements == placements) {
        return move;
      }
    }
    moves_.push_back({placements, with_placements(spec_, placements)});
    return moves_.back();
  }
  double there_us(const Placements& placements) {
    Move& move = to(placements);
    if (move.there < 0) {
      move.there =
          move.spec == spec_ ? 0 : redistribution_us(spec_, move.spec, *costs_);
    }
    return move.there;
  }
  double back_us(const Placements& placements) {
    Move& move = to(placements);
    if (move.back < 0) {
      move.back =
          move.spec == spec_ ? 0 : redistribution_us(move.spec, spec_, *costs_);
    }
    return move.back;
  }
  SpecPtr spec() const {
    return spec_;
  }

 private:
  SpecPtr spec_;
  const CostModel* costs_;
  std::vector<Move> moves_;
};

Placements gather(
    const Combination& combination,
    Placements AxisStrategy::*which,
    size_t index) {
  Placements placements;
  placements.reserve(combination.size());
  for (const AxisStrategy* strategy : combination) {
    placements.push_back((strategy->*which)[index]);
  }
  return placements;
}

// Contributions that the kernel's finishing part reduces.
Placements finished(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) {
      placement = Replicate();
    }
  }
  return placements;
}

class Search {
 public:
  Search(const OpCall& call, const Line& line, const CostModel& costs)
      : call_(&call), line_(&line), costs_(&costs) {
    for (const Operand& operand : line.operands) {
      movers_.emplace_back(operand.spec, costs);
    }
  }

  Decision run() {
    const size_t axes = static_cast<size_t>(call_->mesh.ndim());
    for (size_t axis = 0; axis < axes; ++axis) {
      strategies_.push_back(strategies_of(*line_, call_->mesh, axis));
    }
    prune();
    Combination combination(axes);
    Combination best;
    Price best_price;
    enumerate(0, combination, best, best_price);
    return decision(best);
  }

 private:
  void enumerate(
      size_t axis,
      Combination& combination,
      Combination& best,
      Price& best_price) {
    if (axis == strategies_.size()) {
      if (starves_a_rank(combination)) {
        return;
      }
      const Price price = price_of(combination);
      if (best.empty() || price.better_than(best_price)) {
        best = combination;
        best_price = price;
      }
      return;
    }
    for (const AxisStrategy& strategy : strategies_[axis]) {
      combination[axis] = &strategy;
      enumerate(axis + 1, combination, best, best_price);
    }
  }

  // Whether some rank gets nothing of a letter of which it needs something.
  // The last coordinates have the least.
  bool starves_a_rank(const Combination& combination) const {
    for (Letter letter = 0; letter < std::ssize(line_->letters); ++letter) {
      const LetterInfo& info = line_->letters[static_cast<size_t>(letter)];
      int64_t size = info.extent;
      for (size_t axis = 0; axis < combination.size(); ++axis) {
        if (combination[axis]->letter == letter) {
          const int64_t ranks = call_->mesh.size(static_cast<int64_t>(axis));
          size = chunk(size, combination[axis]->unit, ranks, ranks - 1).size;
        }
      }
      if (info.never_empty && size == 0) {
        return true;
      }
    }
    return false;
  }

  Price price_of(const Combination& combination) {
    Price price;
    for (size_t i = 0; i < movers_.size(); ++i) {
      if (movers_[i].spec() != nullptr) {
        add_operand(combination, i, price);
      }
    }
    for (size_t r = 0; r < line_->results.size(); ++r) {
      const Placements raw = gather(combination, &AxisStrategy::results, r);
      price.sharded += sharded(raw);
      if (line_->finished) {
        price.us += finishing_us(r, raw);
      }
    }
    return price;
  }

  void add_operand(const Combination& combination, size_t i, Price& price) {
    const Placements wanted = gather(combination, &AxisStrategy::operands, i);
    price.us += movers_[i].there_us(wanted);
    price.changed += movers_[i].to(wanted).spec != movers_[i].spec() ? 1 : 0;
    if (line_->operands[i].written) {
      const Placements after = gather(combination, &AxisStrategy::written, i);
      price.us += movers_[i].back_us(after);
      price.changed += movers_[i].to(after).spec != movers_[i].spec() ? 1 : 0;
      price.sharded += sharded(after);
    }
  }

  static int sharded(const Placements& placements) {
    int score = 0;
    for (const Placement& placement : placements) {
      score += placement.is_shard() ? 2 : placement.is_replicate() ? 1 : 0;
    }
    return score;
  }

  double finishing_us(size_t r, const Placements& raw) const {
    const Placements whole = finished(raw);
    if (whole == raw) {
      return 0;
    }
    const auto& sizes = line_->results[r].sizes;
    const c10::ScalarType dtype = first_spec()->dtype;
    return redistribution_us(
        intern_contiguous(call_->mesh, raw, sizes, dtype),
        intern_contiguous(call_->mesh, whole, sizes, dtype),
        *costs_);
  }

  SpecPtr first_spec() const {
    const auto found = std::find_if(
        line_->operands.begin(),
        line_->operands.end(),
        [](const Operand& operand) { return operand.spec != nullptr; });
    return found->spec;
  }

  // Keeps the product of the axes' strategies small: on each axis those that
  // cost least when the other axes stay replicated strategies.
  void prune() {
    size_t product = 1;
    for (const auto& axis : strategies_) {
      product *= axis.size();
    }
    if (product <= kMostCombinations) {
      return;
    }
    const double root = std::pow(
        static_cast<double>(kMostCombinations),
        1.0 / static_cast<double>(strategies_.size()));
    const size_t keep = std::max<size_t>(2, static_cast<size_t>(root));
    for (size_t axis = 0; axis < strategies_.size(); ++axis) {
      keep_cheapest(axis, keep);
    }
  }

  void keep_cheapest(size_t axis, size_t keep) {
    auto& all = strategies_[axis];
    std::vector<std::pair<Price, size_t>> ranked;
    for (size_t s = 0; s < all.size(); ++s) {
      ranked.emplace_back(price_alone(axis, all[s]), s);
    }
    std::stable_sort(
        ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
          return a.first.better_than(b.first);
        });
    std::vector<AxisStrategy> kept;
    for (size_t s = 0; s < ranked.size(); ++s) {
      if (s < keep || ranked[s].second == 0) { // the first is always possible
        kept.push_back(all[ranked[s].second]);
      }
    }
    all = std::move(kept);
  }

  // The price of a strategy when all other axes leave the operands as they are.
  Price price_alone(size_t axis, const AxisStrategy& strategy) {
    Price price;
    for (size_t i = 0; i < movers_.size(); ++i) {
      if (movers_[i].spec() == nullptr) {
        continue;
      }
      Placements wanted = movers_[i].spec()->placements;
      wanted[axis] = strategy.operands[i];
      price.us += movers_[i].there_us(wanted);
      price.changed += movers_[i].to(wanted).spec != movers_[i].spec() ? 1 : 0;
      if (line_->operands[i].written) {
        wanted[axis] = strategy.written[i];
        price.us += movers_[i].back_us(wanted);
      }
    }
    price.sharded = sharded(strategy.results);
    return price;
  }

  Decision decision(const Combination& best) {
    Decision out;
    for (size_t i = 0; i < movers_.size(); ++i) {
      const bool present = movers_[i].spec() != nullptr;
      out.inputs.push_back(
          present ? movers_[i].to(gather(best, &AxisStrategy::operands, i)).spec
                  : nullptr);
      const bool written = present && line_->operands[i].written;
      out.written.push_back(
          written ? movers_[i].to(gather(best, &AxisStrategy::written, i)).spec
                  : nullptr);
    }
    for (size_t r = 0; r < line_->results.size(); ++r) {
      const Result& result = line_->results[r];
      const Placements raw = gather(best, &AxisStrategy::results, r);
      out.outputs.push_back(
          {raw,
           line_->finished ? finished(raw) : raw,
           result.sizes,
           result.strides,
           result.sizes_known});
    }
    const bool contracted =
        std::any_of(best.begin(), best.end(), [](const AxisStrategy* s) {
          return s->contracted;
        });
    out.kernel = contracted && line_->kernel_when_contracted != LocalKernel::kOp
        ? line_->kernel_when_contracted
        : line_->kernel;
    out.numbers = line_->numbers;
    if (out.kernel != LocalKernel::kOp) {
      out.edits = line_->kernel_edits;
    }
    out.is_view = line_->is_view;
    out.fallback = line_->fallback;
    add_local_edits(out);
    return out;
  }

  void add_local_edits(Decision& out) const {
    if (line_->edits.empty()) {
      return;
    }
    const OutputDecision& first = out.outputs.front();
    const auto strides =
        first.strides.empty() ? contiguous_strides(first.sizes) : first.strides;
    const SpecPtr local = intern(
        call_->mesh,
        first.placements,
        first.sizes,
        strides,
        first_spec()->dtype);
    for (const LocalEdit& edit : line_->edits) {
      const bool sizes = edit.what == LocalEdit::What::kSizes;
      out.edits.push_back(
          {edit.arg,
           sizes ? local->local_sizes
                 : dense_strides(local->local_sizes, strides)});
    }
  }

  const OpCall* call_;
  const Line* line_;
  const CostModel* costs_;
  std::vector<Mover> movers_;
  std::vector<std::vector<AxisStrategy>> strategies_;
};

// A call whose parts decide for themselves. What belongs to no part is
// replicated.
Decision propagate_parts(
    const OpCall& call,
    const std::vector<Part>& parts,
    const CostModel& costs) {
  Decision all;
  for (const Operand& operand : operands_of(call)) {
    all.inputs.push_back(
        operand.spec == nullptr
            ? nullptr
            : with_placements(operand.spec, replicated(operand.spec->mesh)));
    all.written.push_back(
        operand.spec != nullptr && operand.written ? all.inputs.back()
                                                   : nullptr);
  }
  for (const Part& part : parts) {
    const Decision one = Search(call, part.line, costs).run();
    for (size_t i = 0; i < part.positions.size(); ++i) {
      all.inputs[part.positions[i]] = one.inputs[i];
      all.written[part.positions[i]] = one.written[i];
    }
    all.outputs.insert(
        all.outputs.end(), one.outputs.begin(), one.outputs.end());
    all.kernel = one.kernel == LocalKernel::kOp ? all.kernel : one.kernel;
    all.numbers = one.numbers.empty() ? all.numbers : one.numbers;
  }
  return all;
}

} // namespace
} // namespace rules

Decision propagate(const OpCall& call, const CostModel& costs) {
  const rules::Rule* rule = rules::find_rule(call.op);
  if (rule != nullptr && rule->table->parts != nullptr) {
    return rules::propagate_parts(
        call, rule->table->parts(*rule->row, call), costs);
  }
  rules::Line line = rule == nullptr ? rules::replicate(call)
                                     : rule->table->build(*rule->row, call);
  line.fallback = rule == nullptr;
  return rules::Search(call, line, costs).run();
}

bool has_rule(std::string_view op) {
  return rules::find_rule(op) != nullptr;
}

std::vector<int64_t> deciding_args(std::string_view op) {
  const rules::Rule* rule = rules::find_rule(op);
  if (rule == nullptr || rule->row->decides < 0) {
    return {};
  }
  return {rule->row->decides};
}

} // namespace tessera
