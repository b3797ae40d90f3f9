// SPDX-License-Identifier: Apache-2.0
//
// Plans are carried out on plain tensors of all ranks in one thread, as the
// headers say each step moves data, and compared with what a recursive cut of
// the value by the target's placements gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/sharding/redistribution.h>
#include <tessera/sharding/simulation_ranks.h>
#include <torch/torch.h>

#include <random>

namespace tessera {
namespace {

using Kind = RedistributionStep::Kind;
using simulation::Locals;
using Sizes = std::vector<int64_t>;
using ::testing::ElementsAre;

size_t at(int64_t index) {
  return static_cast<size_t>(index);
}

at::Tensor narrow(const at::Tensor& tensor, int64_t dim, const Chunk& range) {
  return tensor.narrow(dim, range.offset, range.size);
}

using Steps = std::vector<RedistributionStep>;

std::string text(const Steps& steps) {
  static const char* const kNames[] = {
      "all_reduce",
      "reduce_scatter",
      "all_gather",
      "all_to_all",
      "slice",
      "to_partial",
      "all_reduce_slice",
      "rescale",
      "relabel"};
  std::string result;
  for (const RedistributionStep& step : steps) {
    result += result.empty() ? "" : " ";
    result += std::string(kNames[static_cast<size_t>(step.kind)]) + "@" +
        std::to_string(step.axis);
  }
  return result;
}

// All ranks of an imagined job.
class Job {
 public:
  explicit Job(const std::vector<Axis>& axes, const char* backend = "shm") {
    const int64_t size = describe_mesh(axes).size();
    for (int64_t rank = 0; rank < size; ++rank) {
      meshes_.push_back(describe_mesh(axes, rank, backend));
    }
  }

  const DeviceMesh& mesh() const {
    return meshes_[0];
  }

  // Every rank's plan, which must be the same, by rank.
  std::vector<Steps> plan(
      const Placements& from,
      const Placements& to,
      const Sizes& sizes,
      c10::ScalarType dtype = c10::kDouble) const {
    std::vector<Steps> plans;
    for (const DeviceMesh& mesh : meshes_) {
      SpecPtr source = intern_contiguous(mesh, from, sizes, dtype);
      SpecPtr target = intern_contiguous(mesh, to, sizes, dtype);
      plans.push_back(plan_redistribution(source, target, CostModel()));
      SpecPtr now = source;
      for (const RedistributionStep& step : plans.back()) {
        EXPECT_EQ(step.from, now);
        now = step.to;
        for (int64_t axis = 0; axis < mesh.ndim() && source->numel() > 0;
             ++axis) {
          EXPECT_EQ(
              step.from->placements[at(axis)] != now->placements[at(axis)],
              axis == step.axis)
              << str(from) << " to " << str(to) << ": " << step.from->str()
              << " to " << step.to->str();
        }
      }
      EXPECT_EQ(now, target);
      EXPECT_EQ(text(plans.back()), text(plans.front()));
    }
    return plans;
  }

  // Carries a plan out and checks locals and value.
  void check(
      const Placements& from,
      const Placements& to,
      const Sizes& sizes,
      c10::ScalarType dtype = c10::kDouble) const {
    const std::vector<Steps> plans = plan(from, to, sizes, dtype);
    SCOPED_TRACE(
        str(from) + " to " + str(to) + " of " +
        intern_contiguous(mesh(), from, sizes, dtype)->str() + ": " +
        text(plans[0]));
    const at::Tensor value = torch::randint(-5, 6, sizes, dtype);
    Locals locals = simulation::cut(mesh(), from, value);
    for (size_t i = 0; i < plans[0].size(); ++i) {
      Locals next;
      for (size_t rank = 0; rank < locals.size(); ++rank) {
        next.push_back(moved(plans, i, static_cast<int64_t>(rank), locals));
        ASSERT_EQ(next.back().sizes(), plans[rank][i].to->local_sizes);
      }
      locals = next;
    }
    ASSERT_TRUE(torch::allclose(
        simulation::assemble(mesh(), to, locals), value, 1e-12, 1e-12));
    const bool partial =
        intern_contiguous(mesh(), to, sizes, dtype)->has_partial();
    const Locals expected = simulation::cut(mesh(), to, value);
    for (size_t rank = 0; rank < locals.size() && !partial; ++rank) {
      ASSERT_TRUE(torch::allclose(locals[rank], expected[rank], 1e-12, 1e-12));
    }
  }

 private:
  // The ranks that differ from `rank` on `axis` only.
  std::vector<size_t> peers(int64_t rank, int64_t axis) const {
    std::vector<size_t> result;
    for (size_t other = 0; other < meshes_.size(); ++other) {
      Sizes a = meshes_[other].coordinates();
      Sizes b = meshes_[at(rank)].coordinates();
      a[at(axis)] = b[at(axis)] = 0;
      if (a == b) {
        result.push_back(other);
      }
    }
    return result;
  }

  at::Tensor moved(
      const std::vector<Steps>& plans,
      size_t i,
      int64_t rank,
      const Locals& locals) const {
    const RedistributionStep& step = plans[at(rank)][i];
    const StepLayout layout = step_layout(step);
    const int64_t axis = step.axis;
    const auto mine = at(meshes_[at(rank)].coordinate(axis));
    const at::Tensor& local = locals[at(rank)];
    const Placement& old = step.from->placements[at(axis)];
    const Placement& next = step.to->placements[at(axis)];
    const std::vector<size_t> group = peers(rank, axis);
    Locals theirs;
    for (size_t peer : group) {
      theirs.push_back(locals[peer]);
    }
    switch (step.kind) {
      case Kind::kAllReduce:
        return simulation::reduced(theirs, old.op());
      case Kind::kAllReduceSlice:
        return narrow(
            simulation::reduced(theirs, old.op()),
            layout.send_dim,
            layout.send[mine]);
      case Kind::kReduceScatter:
        for (at::Tensor& tensor : theirs) {
          tensor = narrow(tensor, layout.send_dim, layout.send[mine]);
          EXPECT_EQ(tensor.numel(), layout.send_counts[mine]);
        }
        return simulation::reduced(theirs, old.op());
      case Kind::kAllGather: {
        at::Tensor out = torch::full(step.to->local_sizes, 77, local.options());
        for (size_t j = 0; j < theirs.size(); ++j) {
          EXPECT_EQ(theirs[j].numel(), layout.recv_counts[j]);
          narrow(out, layout.recv_dim, layout.recv[j]).copy_(theirs[j]);
        }
        return out;
      }
      case Kind::kAllToAll: {
        at::Tensor out = torch::full(step.to->local_sizes, 77, local.options());
        for (size_t j = 0; j < theirs.size(); ++j) {
          const StepLayout peer = step_layout(plans[group[j]][i]);
          const at::Tensor piece =
              narrow(theirs[j], peer.send_dim, peer.send[mine]);
          EXPECT_EQ(piece.numel(), peer.send_counts[mine]);
          EXPECT_EQ(piece.numel(), layout.recv_counts[j]);
          at::Tensor place = narrow(out, layout.recv_dim, layout.recv[j]);
          EXPECT_EQ(place.sizes(), piece.sizes());
          place.copy_(piece);
        }
        return out;
      }
      case Kind::kSlice:
        return narrow(local, layout.send_dim, layout.send[mine]).clone();
      case Kind::kToPartial:
        if (mine != 0 && next.is_partial(ReduceOp::kSum)) {
          return torch::zeros_like(local);
        }
        if (mine != 0 && next.is_partial(ReduceOp::kProduct)) {
          return torch::ones_like(local);
        }
        return local.clone();
      case Kind::kRescale:
        return next.is_partial(ReduceOp::kAvg)
            ? local * static_cast<int64_t>(group.size())
            : local / static_cast<int64_t>(group.size());
      case Kind::kRelabel:
        return local.reshape(step.to->local_sizes).clone();
    }
    return {};
  }

  std::vector<DeviceMesh> meshes_;
};

// Every placement of one axis for tensors of `ndim` dims.
Placements all_placements(int64_t ndim) {
  Placements all{
      Replicate(),
      Partial(),
      Partial(ReduceOp::kAvg),
      Partial(ReduceOp::kMax),
      Partial(ReduceOp::kMin),
      Partial(ReduceOp::kProduct)};
  for (int64_t dim = 0; dim < ndim; ++dim) {
    all.emplace_back(Shard(dim));
    all.emplace_back(Shard(dim, 2));
  }
  return all;
}

const std::vector<Sizes>& shapes() {
  static const std::vector<Sizes> all{
      {5, 3}, {10}, {1, 4}, {0, 3}, {}, {3, 1, 7}};
  return all;
}

TEST(Redistribution, IsExactForAllPairsOnOneAxis) {
  torch::manual_seed(1);
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const Job job({{"a", ranks}});
    for (const Sizes& sizes : shapes()) {
      const Placements all = all_placements(static_cast<int64_t>(sizes.size()));
      for (const Placement& from : all) {
        for (const Placement& to : all) {
          job.check({from}, {to}, sizes);
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST(Redistribution, IsExactForIntegersOnOneAxis) {
  torch::manual_seed(2);
  const Job job({{"a", 3}});
  for (const Placement& from : all_placements(2)) {
    for (const Placement& to : all_placements(2)) {
      job.check({from}, {to}, {5, 3}, c10::kLong);
    }
  }
}

// Pairs of placements on 2x2, in parts so that one failure does not hide all.
class RedistributionGrid : public ::testing::TestWithParam<Sizes> {};

TEST_P(RedistributionGrid, IsExactForAllPairs) {
  torch::manual_seed(3);
  const Job job({{"a", 2}, {"b", 2}});
  const auto ndim = static_cast<int64_t>(GetParam().size());
  Placements all{
      Replicate(), Partial(), Partial(ReduceOp::kMax), Shard(0), Shard(0, 2)};
  if (ndim > 1) {
    all.emplace_back(Shard(1));
  } else {
    all.emplace_back(Partial(ReduceOp::kAvg));
    all.emplace_back(Partial(ReduceOp::kProduct));
  }
  std::vector<Placements> pairs;
  for (const Placement& a : all) {
    for (const Placement& b : all) {
      pairs.push_back({a, b});
    }
  }
  for (const Placements& from : pairs) {
    for (const Placements& to : pairs) {
      job.check(from, to, GetParam());
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    RedistributionGrid,
    ::testing::Values(Sizes{5, 3}, Sizes{10}, Sizes{1, 4}));

void check_random(
    const std::vector<Axis>& axes, const char* backend, int samples) {
  torch::manual_seed(4);
  std::mt19937 random(4); // NOLINT(bugprone-random-generator-seed)
  const Job job(axes, backend);
  for (int i = 0; i < samples; ++i) {
    const Sizes& sizes = shapes()[random() % shapes().size()];
    const Placements all = all_placements(static_cast<int64_t>(sizes.size()));
    Placements from;
    Placements to;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      from.push_back(all[random() % all.size()]);
      to.push_back(all[random() % all.size()]);
    }
    job.check(from, to, sizes);
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

TEST(Redistribution, IsExactForRandomPairsOnSeveralAxes) {
  check_random({{"a", 2}, {"b", 3}}, "shm", 400);
  check_random({{"a", 3}, {"b", 2}}, "gloo", 400);
  check_random({{"a", 2}, {"b", 2}, {"c", 2}}, "shm", 300);
  check_random({{"a", 2}, {"b", 1}, {"c", 3}}, "gloo", 200);
  check_random({{"a", 2}, {"b", 2}, {"c", 1}, {"d", 2}}, "shm", 100);
  check_random({{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}}, "shm", 30);
}

std::string plan_text(
    const Job& job,
    const Placements& from,
    const Placements& to,
    const Sizes& sizes) {
  job.check(from, to, sizes);
  return text(job.plan(from, to, sizes)[0]);
}

TEST(Redistribution, UsesOneCollectivePerPairOnOneAxis) {
  const Job job({{"a", 2}});
  const Sizes sizes{64, 32};
  const auto plan = [&](const Placement& from, const Placement& to) {
    return plan_text(job, {from}, {to}, sizes);
  };
  EXPECT_EQ(plan(Replicate(), Replicate()), "");
  EXPECT_EQ(plan(Partial(), Replicate()), "all_reduce@0");
  EXPECT_EQ(plan(Partial(), Shard(0)), "reduce_scatter@0");
  EXPECT_EQ(plan(Partial(ReduceOp::kAvg), Shard(1)), "reduce_scatter@0");
  EXPECT_EQ(plan(Shard(0), Replicate()), "all_gather@0");
  EXPECT_EQ(plan(Shard(0), Shard(1)), "all_to_all@0");
  EXPECT_EQ(plan(Shard(0), Shard(0, 48)), "all_to_all@0");
  EXPECT_EQ(plan(Shard(0, 40), Shard(0, 63)), "all_to_all@0");
  EXPECT_EQ(plan(Shard(0, 63), Shard(0, 64)), "all_to_all@0");
  EXPECT_EQ(plan(Shard(0, 64), Shard(0, 65)), "relabel@0");
  EXPECT_EQ(plan(Replicate(), Shard(1)), "slice@0");
  EXPECT_EQ(plan(Replicate(), Partial(ReduceOp::kMax)), "to_partial@0");
  EXPECT_EQ(plan(Partial(), Partial(ReduceOp::kAvg)), "rescale@0");
  EXPECT_EQ(plan(Partial(ReduceOp::kAvg), Partial()), "rescale@0");
  EXPECT_EQ(
      plan(Partial(ReduceOp::kMax), Partial()), "all_reduce@0 to_partial@0");
  EXPECT_EQ(plan(Shard(0), Partial()), "all_gather@0 to_partial@0");
  EXPECT_EQ(
      text(job.plan(
          {Partial(ReduceOp::kAvg)}, {Partial()}, sizes, c10::kLong)[0]),
      "all_reduce@0 to_partial@0");
}

TEST(Redistribution, FollowsTheLinksCosts) {
  for (const char* backend : {"shm", "gloo"}) {
    const Job job({{"a", 2}}, backend);
    for (const Sizes& sizes : {Sizes{2}, Sizes{512, 64}, Sizes{65536, 16}}) {
      EXPECT_EQ(
          plan_text(job, {Partial()}, {Shard(0)}, sizes), "reduce_scatter@0");
    }
  }
  // A backend whose reduce_scatter is slow: all_reduce, then the own part.
  const DeviceMesh mesh = describe_mesh({{"a", 2}});
  SpecPtr partial =
      intern_contiguous(mesh, {Partial()}, Sizes{512, 64}, c10::kFloat);
  const Steps steps = plan_redistribution(
      partial,
      with_placements(partial, {Shard(0)}),
      CostModel(LinkCost{600, 1.5, 0.8, 1.2, 0.8}));
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].kind, RedistributionStep::Kind::kAllReduceSlice);
}

TEST(Redistribution, LeavesAxesAloneThatDoNotChange) {
  const Job job({{"a", 2}, {"b", 2}});
  const Sizes sizes{64, 32};
  const Placement r = Replicate();
  const Placement p = Partial();
  const Placement s0 = Shard(0);
  const Placement s1 = Shard(1);
  EXPECT_EQ(plan_text(job, {s0, s1}, {s0, r}, sizes), "all_gather@1");
  EXPECT_EQ(plan_text(job, {p, s0}, {s1, s0}, sizes), "reduce_scatter@0");
  EXPECT_EQ(plan_text(job, {p, s0}, {r, s0}, sizes), "all_reduce@0");
  EXPECT_EQ(plan_text(job, {s0, s0}, {s0, s1}, sizes), "all_to_all@1");
  EXPECT_EQ(plan_text(job, {s0, p}, {s0, s0}, sizes), "reduce_scatter@1");
  EXPECT_EQ(
      plan_text(job, {p, p}, {s0, s1}, sizes),
      "reduce_scatter@0 reduce_scatter@1");
}

TEST(Redistribution, UnwindsNestsFromTheRight) {
  const Job job({{"a", 2}, {"b", 2}});
  const Sizes sizes{10, 6};
  const std::string plan =
      plan_text(job, {Shard(0), Shard(0)}, {Replicate(), Replicate()}, sizes);
  EXPECT_EQ(plan, "all_gather@1 all_gather@0");
}

// Swapping two dims of a large tensor between the axes gathers it nowhere.
TEST(Redistribution, GathersNothingWholeWhereItCanTurnAside) {
  const Job job({{"a", 2}, {"b", 2}});
  const Sizes sizes{1024, 1024};
  for (const Steps& steps :
       job.plan({Replicate(), Shard(0)}, {Shard(0), Shard(0)}, sizes)) {
    for (const RedistributionStep& step : steps) {
      EXPECT_LE(step.to->local_numel, 1024 * 1024 / 2) << text(steps);
    }
  }
}

// The table of the system that this one follows.
TEST(Redistribution, DoesTheRowsOfMeshesWithAnAxisOfOne) {
  const Job job({{"x", 2}, {"y", 1}});
  const Placement r = Replicate();
  const Placement p = Partial();
  const Placement s0 = Shard(0);
  const Placement s1 = Shard(1);
  for (const Sizes& sizes : {Sizes{4, 6}, Sizes{5, 3}, Sizes{1, 4}}) {
    EXPECT_EQ(plan_text(job, {p, s0}, {r, s0}, sizes), "all_reduce@0");
    EXPECT_EQ(plan_text(job, {p, s0}, {r, r}, sizes), "relabel@1 all_reduce@0");
    EXPECT_EQ(plan_text(job, {p, r}, {r, p}, sizes), "relabel@1 all_reduce@0");
    EXPECT_EQ(plan_text(job, {p, r}, {s0, r}, sizes), "reduce_scatter@0");
    EXPECT_EQ(plan_text(job, {r, s1}, {s0, r}, sizes), "relabel@1 slice@0");
    job.check({p, p}, {s0, s1}, sizes);
  }
}

TEST(Redistribution, ScattersPartialsOfAllShapesAndAxes) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    const Job job({{"dp", ranks}});
    for (const Sizes& sizes : {Sizes{10, 4}, Sizes{7, 3, 2}, Sizes{1001, 2}}) {
      for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
        job.check({Partial()}, {Shard(dim)}, sizes);
        job.check({Partial(ReduceOp::kAvg)}, {Shard(dim)}, sizes);
      }
    }
  }
}

TEST(Redistribution, ReducesNestedPartialsFromTheRight) {
  const Job job({{"a", 2}, {"b", 2}});
  const Placement sum = Partial();
  const Placement max = Partial(ReduceOp::kMax);
  EXPECT_EQ(
      plan_text(job, {max, sum}, {Shard(0), Shard(1)}, {8, 8}),
      "reduce_scatter@1 reduce_scatter@0");
  EXPECT_EQ(
      plan_text(job, {sum, max}, {Replicate(), Replicate()}, {8, 8}),
      "all_reduce@1 all_reduce@0");
}

TEST(Redistribution, PricesWhatItPlans) {
  const DeviceMesh mesh = describe_mesh({{"a", 2}, {"b", 2}});
  const CostModel costs;
  const auto spec = [&](const Placements& placements) {
    return intern_contiguous(mesh, placements, Sizes{256, 256}, c10::kFloat);
  };
  SpecPtr replicated = spec({Replicate(), Replicate()});
  SpecPtr partial = spec({Partial(), Replicate()});
  SpecPtr sharded = spec({Shard(0), Replicate()});
  EXPECT_EQ(redistribution_us(partial, partial, costs), 0);
  EXPECT_NEAR(
      redistribution_us(partial, replicated, costs),
      costs.collective_us(mesh, 0, CollectiveKind::kAllReduce, 256 * 256 * 4),
      1e-3); // the planner counts whole nanoseconds
  EXPECT_LT(
      redistribution_us(partial, sharded, costs),
      redistribution_us(partial, replicated, costs));
  EXPECT_LT(
      redistribution_us(replicated, sharded, costs),
      redistribution_us(sharded, replicated, costs));
  EXPECT_EQ(
      redistribution_us(partial, sharded->placements, costs),
      redistribution_us(partial, sharded, costs));
}

TEST(Redistribution, RefusesSpecsOfDifferentTensors) {
  const DeviceMesh mesh = describe_mesh({{"a", 2}});
  SpecPtr a = intern_contiguous(mesh, {Shard(0)}, Sizes{4}, c10::kFloat);
  SpecPtr b = intern_contiguous(mesh, {Shard(0)}, Sizes{5}, c10::kFloat);
  EXPECT_THROW(plan_redistribution(a, b, CostModel()), UsageError);
}

TEST(CostModel, ChargesNothingForAnAxisOfOne) {
  const DeviceMesh mesh = describe_mesh({{"a", 1}, {"b", 4}}, 0, "gloo");
  const CostModel costs;
  EXPECT_EQ(costs.collective_us(mesh, 0, CollectiveKind::kAllReduce, 1024), 0);
  EXPECT_GT(costs.collective_us(mesh, 1, CollectiveKind::kAllReduce, 0), 0);
  EXPECT_LT(
      costs.collective_us(mesh, 1, CollectiveKind::kReduceScatter, 1 << 24),
      costs.collective_us(mesh, 1, CollectiveKind::kAllReduce, 1 << 24));
}

} // namespace
} // namespace tessera
