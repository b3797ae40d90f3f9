// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/optim/gradient_placements.h>

#include <numeric>

namespace tessera {
namespace {

struct Example {
  std::vector<int64_t> mesh;
  int64_t axis;
  Placements gradient;
  std::vector<int64_t> sizes;
  Placements sharded;
  Placements reduced;
};

// The second fix's examples first, then its corners.
const std::vector<Example> kExamples = {
    {{2, 2, 2},
     0,
     {Partial(), Partial(), Partial()},
     {4, 6},
     {Shard(0), Shard(1), Replicate()},
     {Replicate(), Replicate(), Replicate()}},
    {{2, 2, 2},
     0,
     {Partial(), Shard(0), Partial()},
     {4, 6},
     {Shard(1), Shard(0), Replicate()},
     {Replicate(), Shard(0), Replicate()}},
    {{2, 2},
     0,
     {Partial(), Shard(1)},
     {4, 6},
     {Shard(0), Shard(1)},
     {Replicate(), Shard(1)}},
    {{2, 2},
     1,
     {Partial(), Partial()},
     {4, 6},
     {Shard(1), Shard(0)},
     {Replicate(), Replicate()}},
    {{2}, 0, {Partial()}, {4}, {Shard(0)}, {Replicate()}},
    {{2, 2},
     0,
     {Partial(), Shard(0)},
     {4},
     {Replicate(), Shard(0)},
     {Replicate(), Shard(0)}},
    {{2}, 0, {Partial()}, {}, {Replicate()}, {Replicate()}},
    // A tensor dim of one element is never sharded; nor over an axis of one
    // rank.
    {{2}, 0, {Partial()}, {1, 6}, {Shard(1)}, {Replicate()}},
    {{2}, 0, {Partial()}, {1, 1}, {Replicate()}, {Replicate()}},
    {{1, 2},
     0,
     {Partial(), Partial()},
     {4, 6},
     {Replicate(), Shard(0)},
     {Replicate(), Replicate()}},
    {{1, 2},
     1,
     {Partial(), Partial()},
     {4, 6},
     {Replicate(), Shard(0)},
     {Replicate(), Replicate()}},
    // Shard and Replicate axes stay, the sharding axis among them.
    {{2, 2},
     0,
     {Shard(1), Partial()},
     {4, 6},
     {Shard(1), Shard(0)},
     {Shard(1), Replicate()}},
    {{2, 2},
     0,
     {Replicate(), Partial()},
     {4, 6},
     {Replicate(), Shard(0)},
     {Replicate(), Replicate()}},
    {{2, 2},
     1,
     {Partial(), Replicate()},
     {4, 6},
     {Shard(0), Replicate()},
     {Replicate(), Replicate()}},
    // Other reductions go the same way; a unit of a shard is kept.
    {{2}, 0, {Partial(ReduceOp::kAvg)}, {3, 2}, {Shard(0)}, {Replicate()}},
    {{2, 2},
     0,
     {Partial(), Shard(0, 4)},
     {12, 6},
     {Shard(1), Shard(0, 4)},
     {Replicate(), Shard(0, 4)}},
    // No axis goes first.
    {{2, 2},
     -1,
     {Partial(), Partial()},
     {4, 6},
     {Shard(0), Shard(1)},
     {Replicate(), Replicate()}},
};

void check(const World& world, const Example& example) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < example.mesh.size(); ++i) {
    axes.push_back({"axis" + std::to_string(i), example.mesh[i]});
  }
  const DeviceMesh mesh = make_mesh(world, axes);
  const SpecPtr spec =
      intern_contiguous(mesh, example.gradient, example.sizes, c10::kFloat);
  EXPECT_EQ(str(shard_gradient(*spec, example.axis)), str(example.sharded))
      << spec->str() << " axis " << example.axis;
  EXPECT_EQ(str(all_reduce_gradient(*spec)), str(example.reduced))
      << spec->str();
}

TEST(GradientPlacements, FollowTheTableOnEveryMesh) {
  for (const int64_t ranks : {2, 4, 8}) {
    run_ranks(ranks, [ranks](World world) {
      for (const Example& example : kExamples) {
        if (std::reduce(
                example.mesh.begin(),
                example.mesh.end(),
                int64_t{1},
                std::multiplies<>()) == ranks) {
          check(world, example);
        }
      }
    });
  }
}

TEST(GradientPlacements, NeverShardInAWorldOfOne) {
  run_ranks(1, [](World world) {
    check(world, {{1}, 0, {Partial()}, {4, 6}, {Replicate()}, {Replicate()}});
  });
}

TEST(GradientPlacements, RefuseAnAxisThatTheMeshHasNot) {
  run_ranks(1, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
    const SpecPtr spec = intern_contiguous(mesh, {Partial()}, {4}, c10::kFloat);
    EXPECT_THROW(shard_gradient(*spec, 1), UsageError);
    EXPECT_THROW(shard_gradient(*spec, -2), UsageError);
  });
}

} // namespace
} // namespace tessera
