// SPDX-License-Identifier: Apache-2.0
//
// A redistribution goes by steps that each change one mesh axis, so that each
// is one collective of that axis's group, or local. Between R, S and P on one
// axis the step is known (redistribution_edge.cc); what has to be found is the
// order of the axes and the placements in between. Both follow from a shortest
// path through the graph whose nodes are placements of all axes:
//
//   [P, S0] --b: all_to_all--> [P, S1] --a: reduce_scatter--> [S0, S1] ...
//
// Axes that share a dim nest, the left one outermost, and so do Partials. That
// forbids some edges, and only the edges that are left are exact:
//  - An axis may enter or leave Shard(d) only while no axis right of it is
//    Shard(d): the right one's chunks are chunks of the left one's chunk, and
//    would mean something else afterwards. So nests are wound from the left and
//    unwound from the right.
//  - A Partial may be reduced or rescaled only while every Partial right of it
//    commutes with it: the right one is reduced first.
//  - Replicate may become Partial(product) only while no axis right of it is
//    Partial(sum): the ones that fill the other ranks would be added up.
// The target is always reached: unwind all axes from the right, wind up again
// from the left.
//
// Axes of size 1 take no part: whatever they say, each rank holds the same. So
// that the graph stays small, an axis may pass through R, through what it was
// and will be, and through Shard of the dims that either spec cuts; where two
// axes meet in one dim also through one dim that nobody uses, since turning
// aside into it can be cheaper than gathering.
//
// Costs are counted in whole nanoseconds of the largest rank (coordinate 0 on
// every axis), and ties are broken by the number of steps and the node's code,
// so that every rank finds the same path.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/index.h>
#include <tessera/sharding/redistribution.h>
#include <tessera/sharding/redistribution_edge.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <tuple>

namespace tessera {

namespace {

using Kind = RedistributionStep::Kind;

constexpr int64_t kMaxNodes = 20'000; // of the wide graph, else a narrow one
constexpr int64_t kMaxNarrowNodes = 2'000'000;

// The placements that one axis may pass through, the first being what it is.
using Options = std::vector<Placement>;

void add_option(Options& options, const Placement& placement) {
  if (std::find(options.begin(), options.end(), placement) == options.end()) {
    options.push_back(placement);
  }
}

// The graph of one redistribution. A node's code has a digit per axis: the
// index into the axis's options.
class Graph {
 public:
  Graph(SpecPtr from, const Placements& to, const CostModel& costs)
      : mover_(*from, costs), mesh_(from->mesh), start_(from->placements) {
    const std::vector<int64_t> dims = useful_dims(*from, to);
    add_options(to, dims);
    if (count() > kMaxNodes) {
      add_options(to, {});
    }
    if (count() > kMaxNarrowNodes) {
      throw UsageError(fmt::format(
          "redistribute {} to {} on {}: too many axes change at once; go by "
          "way "
          "of placements that change fewer",
          str(start_),
          str(to),
          mesh_.str()));
    }
    target_ = code_of(to);
  }

  std::vector<PlanEdge> shortest_path() const;

 private:
  struct Reached {
    int64_t cost_ns = std::numeric_limits<int64_t>::max();
    int64_t steps = 0;
    int64_t previous = -1;
    std::optional<PlanEdge> edge;
    bool done = false;
  };
  using Entry = std::tuple<int64_t, int64_t, int64_t>; // cost, steps, code
  using Frontier =
      std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;

  std::vector<int64_t> useful_dims(
      const TensorSpec& spec, const Placements& to) const;
  void add_options(const Placements& to, const std::vector<int64_t>& dims);
  int64_t count() const;
  int64_t code_of(const Placements& placements) const;
  Placements placements_of(int64_t code) const;
  void visit(int64_t code, std::vector<Reached>& nodes, Frontier& open) const;

  TensorMover mover_;
  const DeviceMesh& mesh_;
  const Placements& start_;
  std::vector<Options> options_; // of every axis
  int64_t target_ = 0;
};

// The dims that either side cuts, and where two axes meet in one, the longest
// of the others.
std::vector<int64_t> Graph::useful_dims(
    const TensorSpec& spec, const Placements& to) const {
  std::vector<int64_t> users(spec.sizes.size());
  for (size_t axis = 0; axis < start_.size(); ++axis) {
    const Placement& a = start_[axis];
    const Placement& b = to[axis];
    if (mesh_.axes()[axis].size > 1 && a.is_shard()) {
      ++users[at(a.dim())];
    }
    if (mesh_.axes()[axis].size > 1 && b.is_shard() && !a.is_shard(b.dim())) {
      ++users[at(b.dim())];
    }
  }
  std::vector<int64_t> dims;
  int64_t spare = -1;
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    if (users[at(dim)] > 0) {
      dims.push_back(dim);
    } else if (spare < 0 || spec.sizes[at(dim)] > spec.sizes[at(spare)]) {
      spare = dim;
    }
  }
  const bool shared = std::any_of(
      users.begin(), users.end(), [](int64_t count) { return count > 1; });
  if (shared && spare >= 0) {
    dims.push_back(spare);
  }
  return dims;
}

void Graph::add_options(
    const Placements& to, const std::vector<int64_t>& dims) {
  options_.assign(start_.size(), {});
  for (size_t axis = 0; axis < start_.size(); ++axis) {
    Options& options = options_[axis];
    options.push_back(start_[axis]);
    add_option(options, to[axis]);
    if (mesh_.axes()[axis].size == 1) {
      continue; // never taken, see visit()
    }
    const bool idle = dims.empty() && start_[axis] == to[axis] &&
        !start_[axis].is_shard() && !start_[axis].is_partial();
    if (!idle) {
      add_option(options, Replicate());
    }
    for (int64_t dim : dims) {
      add_option(options, Shard(dim));
    }
  }
}

int64_t Graph::count() const {
  int64_t product = 1;
  for (const Options& options : options_) {
    product *= static_cast<int64_t>(options.size());
    if (product > kMaxNarrowNodes) {
      return product;
    }
  }
  return product;
}

// Axes of size 1 stay at their first option.
int64_t Graph::code_of(const Placements& placements) const {
  int64_t code = 0;
  for (size_t axis = options_.size(); axis-- > 0;) {
    const Options& options = options_[axis];
    const auto digit = mesh_.axes()[axis].size == 1
        ? 0
        : std::find(options.begin(), options.end(), placements[axis]) -
            options.begin();
    code = code * static_cast<int64_t>(options.size()) + digit;
  }
  return code;
}

Placements Graph::placements_of(int64_t code) const {
  Placements placements;
  for (const Options& options : options_) {
    const auto base = static_cast<int64_t>(options.size());
    placements.push_back(options[at(code % base)]);
    code /= base;
  }
  return placements;
}

void Graph::visit(
    int64_t code, std::vector<Reached>& nodes, Frontier& open) const {
  const Placements now = placements_of(code);
  const Reached here = nodes[at(code)];
  int64_t weight = 1;
  for (int64_t axis = 0; axis < mesh_.ndim(); ++axis) {
    const Options& options = options_[at(axis)];
    const auto base = static_cast<int64_t>(options.size());
    const int64_t digit = code / weight % base;
    for (int64_t other = 0; other < base; ++other) {
      if (other == digit || mesh_.size(axis) == 1) {
        continue;
      }
      const int64_t next = code + (other - digit) * weight;
      if (nodes[at(next)].done) {
        continue;
      }
      const auto edge = mover_.edge(now, axis, options[at(other)]);
      if (!edge) {
        continue;
      }
      const int64_t cost = here.cost_ns + edge->cost_ns;
      const int64_t steps = here.steps + 1;
      Reached& there = nodes[at(next)];
      if (std::tie(cost, steps) < std::tie(there.cost_ns, there.steps)) {
        there = {cost, steps, code, edge, false};
        open.emplace(cost, steps, next);
      }
    }
    weight *= base;
  }
}

std::vector<PlanEdge> Graph::shortest_path() const {
  std::vector<Reached> nodes(at(count()));
  Frontier open;
  const int64_t start = code_of(start_);
  nodes[at(start)].cost_ns = 0;
  open.emplace(0, 0, start);
  while (!nodes[at(target_)].done) {
    const int64_t code = std::get<2>(open.top());
    open.pop();
    if (!nodes[at(code)].done) {
      nodes[at(code)].done = true;
      visit(code, nodes, open);
    }
  }
  std::vector<PlanEdge> path;
  for (int64_t code = target_; code != start; code = nodes[at(code)].previous) {
    path.push_back(*nodes[at(code)].edge);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

// The axes that differ and have more than one rank.
std::vector<int64_t> moving_axes(const TensorSpec& from, const Placements& to) {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < from.mesh.ndim(); ++axis) {
    if (from.mesh.size(axis) > 1 && from.placements[at(axis)] != to[at(axis)]) {
      axes.push_back(axis);
    }
  }
  return axes;
}

// The edges of the plan but for those that only relabel.
std::vector<PlanEdge> find_path(
    SpecPtr from, const Placements& to, const CostModel& costs) {
  const std::vector<int64_t> axes = moving_axes(*from, to);
  if (axes.empty() || from->numel() == 0) {
    return {};
  }
  if (axes.size() == 1) {
    const TensorMover mover(*from, costs);
    if (const auto edge =
            mover.edge(from->placements, axes[0], to[at(axes[0])])) {
      return {*edge};
    }
  }
  return Graph(from, to, costs).shortest_path();
}

void append(
    std::vector<RedistributionStep>& steps,
    SpecPtr& now,
    int64_t axis,
    const Placement& placement,
    Kind kind) {
  Placements placements = now->placements;
  placements[at(axis)] = placement;
  SpecPtr next = with_placements(now, placements);
  // A unit that this state of the other axes makes meaningless is no change.
  if (next != now) {
    steps.push_back({kind, axis, now, next});
    now = next;
  }
}

int64_t first_difference(const TensorSpec& from, const TensorSpec& to) {
  const auto pair = std::mismatch(
      from.placements.begin(), from.placements.end(), to.placements.begin());
  return pair.first - from.placements.begin();
}

void check_same_tensor(SpecPtr from, SpecPtr to) {
  if (from->mesh != to->mesh || from->sizes != to->sizes ||
      from->dtype != to->dtype) {
    throw UsageError(fmt::format(
        "redistribute: from {} to {}; mesh, sizes and dtype must be the same",
        from->str(),
        to->str()));
  }
}

} // namespace

std::vector<RedistributionStep> plan_redistribution(
    SpecPtr from, SpecPtr to, const CostModel& costs) {
  check_same_tensor(from, to);
  if (from->placements == to->placements) {
    return {};
  }
  if (from->numel() == 0) {
    return {{Kind::kRelabel, first_difference(*from, *to), from, to}};
  }
  std::vector<RedistributionStep> steps;
  SpecPtr now = from;
  for (int64_t axis = 0; axis < from->mesh.ndim(); ++axis) {
    if (from->mesh.size(axis) == 1) {
      append(steps, now, axis, to->placements[at(axis)], Kind::kRelabel);
    }
  }
  for (const PlanEdge& edge : find_path(from, to->placements, costs)) {
    append(steps, now, edge.axis, edge.placement, edge.kind);
  }
  steps.back().to = to;
  return steps;
}

double redistribution_us(
    SpecPtr from, const Placements& to, const CostModel& costs) {
  int64_t total_ns = 0;
  for (const PlanEdge& edge : find_path(from, to, costs)) {
    total_ns += edge.cost_ns;
  }
  return static_cast<double>(total_ns) / 1e3;
}

double redistribution_us(SpecPtr from, SpecPtr to, const CostModel& costs) {
  check_same_tensor(from, to);
  return redistribution_us(from, to->placements, costs);
}

} // namespace tessera
