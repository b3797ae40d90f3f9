// SPDX-License-Identifier: Apache-2.0
#include <tessera/sharding/strategies.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

namespace tessera::rules {
namespace {

const Placement& current(const Operand& operand, size_t axis) {
  return operand.spec->placements[axis];
}

AxisStrategy replicated(const Line& line) {
  AxisStrategy strategy;
  strategy.operands.resize(line.operands.size());
  strategy.written.resize(line.operands.size());
  strategy.results.resize(line.results.size());
  return strategy;
}

// The dim of a tensor that has the letter; -1 if none.
int64_t dim_of(const std::vector<DimUse>& dims, Letter letter) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].letter == letter) {
      return static_cast<int64_t>(d);
    }
  }
  return -1;
}

Placement cut(const std::vector<DimUse>& dims, int64_t dim, int64_t unit) {
  return Shard(dim, unit * dims[static_cast<size_t>(dim)].scale);
}

bool has_letter(const Line& line, Letter letter) {
  return std::any_of(
      line.operands.begin(), line.operands.end(), [&](const Operand& operand) {
        return dim_of(operand.dims, letter) >= 0;
      });
}

// Strategy 2. Nothing when a result cannot be without the letter.
std::optional<AxisStrategy> cut_letter(
    const Line& line, Letter letter, int64_t unit) {
  const auto reduction = line.letters[static_cast<size_t>(letter)].reduction;
  AxisStrategy strategy = replicated(line);
  strategy.letter = letter;
  strategy.unit = unit;
  const auto outcome = [&](const std::vector<DimUse>& dims,
                           Placement& placement) {
    const int64_t dim = dim_of(dims, letter);
    if (dim >= 0) {
      placement = cut(dims, dim, unit);
    } else if (reduction) {
      placement = Partial(*reduction);
      strategy.contracted = true;
    }
    return dim >= 0 || reduction.has_value();
  };
  for (size_t r = 0; r < line.results.size(); ++r) {
    if (!line.results[r].constant &&
        !outcome(line.results[r].dims, strategy.results[r])) {
      return std::nullopt;
    }
  }
  for (size_t i = 0; i < line.operands.size(); ++i) {
    if (line.operands[i].written &&
        !outcome(line.operands[i].dims, strategy.written[i])) {
      return std::nullopt;
    }
  }
  for (size_t i = 0; i < line.operands.size(); ++i) {
    const int64_t dim = dim_of(line.operands[i].dims, letter);
    if (dim >= 0) {
      strategy.operands[i] = cut(line.operands[i].dims, dim, unit);
    } else if (line.operands[i].additive && strategy.contracted) {
      strategy.operands[i] = Partial(ReduceOp::kSum);
    }
  }
  return strategy;
}

// Strategy 3.
AxisStrategy pass_partial(
    const Line& line, const std::vector<int>& group, ReduceOp op) {
  AxisStrategy strategy = replicated(line);
  for (const int i : group) {
    strategy.operands[static_cast<size_t>(i)] = Partial(op);
  }
  for (size_t i = 0; i < line.operands.size(); ++i) {
    strategy.written[i] = Partial(op);
  }
  for (size_t r = 0; r < line.results.size(); ++r) {
    strategy.results[r] = line.results[r].constant ? Placement(Replicate())
                                                   : Placement(Partial(op));
  }
  return strategy;
}

void add_unique(std::vector<int64_t>& values, int64_t value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) {
    values.push_back(value);
  }
}

// The units in which operands have the letter cut on this axis.
std::vector<int64_t> units_in_use(
    const Line& line, Letter letter, size_t axis) {
  std::vector<int64_t> units;
  for (const Operand& operand : line.operands) {
    const int64_t dim =
        operand.spec == nullptr ? -1 : dim_of(operand.dims, letter);
    if (dim >= 0 && current(operand, axis).is_shard(dim)) {
      const int64_t unit = current(operand, axis).unit();
      const int64_t scale = operand.dims[static_cast<size_t>(dim)].scale;
      add_unique(units, unit % scale == 0 ? unit / scale : 1);
    }
  }
  return units;
}

// Whether some operand cannot stay as it is under any letter, so that all
// letters deserve a look.
bool something_must_move(const Line& line, size_t axis) {
  return std::any_of(
      line.operands.begin(), line.operands.end(), [&](const Operand& operand) {
        if (operand.spec == nullptr || operand.shape_only) {
          return false;
        }
        const Placement& placement = current(operand, axis);
        return placement.is_partial() ||
            (placement.is_shard() &&
             operand.dims[static_cast<size_t>(placement.dim())].letter ==
                 kWhole);
      });
}

void add_letters(
    const Line& line,
    const DeviceMesh& mesh,
    size_t axis,
    std::vector<AxisStrategy>& strategies) {
  const int64_t ranks = mesh.size(static_cast<int64_t>(axis));
  const bool all = something_must_move(line, axis);
  for (Letter letter = 0; letter < static_cast<Letter>(line.letters.size());
       ++letter) {
    std::vector<int64_t> units = units_in_use(line, letter, axis);
    if (!has_letter(line, letter)) {
      continue;
    }
    if (!units.empty() ||
        (all && line.letters[static_cast<size_t>(letter)].extent >= ranks)) {
      add_unique(units, 1);
    }
    for (const int64_t unit : units) {
      if (auto strategy = cut_letter(line, letter, unit)) {
        strategies.push_back(std::move(*strategy));
      }
    }
  }
}

void add_partials(
    const Line& line, size_t axis, std::vector<AxisStrategy>& strategies) {
  for (const Operand& operand : line.operands) {
    if (operand.spec != nullptr && !operand.shape_only &&
        current(operand, axis).is_shard()) {
      return;
    }
  }
  for (const std::vector<int>& group : line.linear) {
    std::vector<int64_t> ops;
    for (const int i : group) {
      const Placement& placement =
          current(line.operands[static_cast<size_t>(i)], axis);
      const bool passes = line.any_partial ||
          placement.is_partial(ReduceOp::kSum) ||
          placement.is_partial(ReduceOp::kAvg);
      if (placement.is_partial() && passes) {
        add_unique(ops, static_cast<int64_t>(placement.op()));
      }
    }
    for (const int64_t op : ops) {
      strategies.push_back(
          pass_partial(line, group, static_cast<ReduceOp>(op)));
    }
  }
}

// Operands whose values are not read keep a Partial where they would be whole
// anyway.
void leave_unread(const Line& line, size_t axis, AxisStrategy& strategy) {
  for (size_t i = 0; i < line.operands.size(); ++i) {
    const Operand& operand = line.operands[i];
    if (operand.spec == nullptr || !operand.shape_only) {
      continue;
    }
    if (operand.untouched ||
        (!strategy.operands[i].is_shard() &&
         !current(operand, axis).is_shard())) {
      strategy.operands[i] = current(operand, axis);
    }
  }
}

bool only_shapes(const Line& line) {
  return line.any_partial &&
      std::all_of(
             line.operands.begin(),
             line.operands.end(),
             [](const Operand& operand) { return operand.shape_only; });
}

} // namespace

std::vector<AxisStrategy> strategies_of(
    const Line& line, const DeviceMesh& mesh, size_t axis) {
  std::vector<AxisStrategy> strategies{replicated(line)};
  const bool moved = std::any_of(
      line.operands.begin(), line.operands.end(), [&](const Operand& operand) {
        return operand.spec != nullptr &&
            !current(operand, axis).is_replicate();
      });
  if (moved) {
    add_letters(line, mesh, axis, strategies);
    add_partials(line, axis, strategies);
  }
  if (strategies.size() > 1 && only_shapes(line)) {
    strategies.erase(strategies.begin()); // a fresh tensor like another one
  }
  for (AxisStrategy& strategy : strategies) {
    leave_unread(line, axis, strategy);
  }
  return strategies;
}

} // namespace tessera::rules
