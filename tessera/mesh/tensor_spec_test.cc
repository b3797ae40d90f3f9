// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/mesh/usage_error_of.h>

#include <limits>
#include <set>
#include <thread>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Sizes = std::vector<int64_t>;

SpecPtr floats(
    const DeviceMesh& mesh, const Placements& placements, const Sizes& sizes) {
  return intern_contiguous(mesh, placements, sizes, c10::kFloat);
}

TEST(Placement, PrintsShort) {
  EXPECT_EQ(
      str(Placements{Shard(0), Replicate(), Partial(), Shard(1, 256)}),
      "[S0, R, P, S1/256]");
  EXPECT_EQ(Placement(Partial(ReduceOp::kMax)).str(), "P(max)");
}

TEST(TensorSpec, IsTheSameObjectForEqualArguments) {
  const DeviceMesh mesh = describe_mesh({{"dp", 2}, {"tp", 2}});
  SpecPtr spec = floats(mesh, {Shard(0), Replicate()}, {4, 6});
  EXPECT_EQ(spec, floats(mesh, {Shard(-2), Replicate()}, {4, 6}));
  EXPECT_EQ(
      spec,
      intern(
          mesh,
          {Shard(0), Replicate()},
          Sizes{4, 6},
          Sizes{6, 1},
          c10::kFloat));
  std::set<uint64_t> ids{spec->id};
  ids.insert(floats(mesh, {Shard(0), Replicate()}, {4, 7})->id);
  ids.insert(floats(mesh, {Shard(1), Replicate()}, {4, 6})->id);
  ids.insert(floats(mesh, {Replicate(), Shard(0)}, {4, 6})->id);
  ids.insert(floats(mesh, {Partial(), Replicate()}, {4, 6})->id);
  ids.insert(floats(mesh, {Partial(ReduceOp::kAvg), Replicate()}, {4, 6})->id);
  ids.insert(
      intern(mesh, spec->placements, Sizes{4, 6}, Sizes{1, 4}, c10::kFloat)
          ->id);
  ids.insert(
      intern_contiguous(mesh, spec->placements, Sizes{4, 6}, c10::kInt)->id);
  ids.insert(
      floats(describe_mesh({{"dp", 2}, {"tp", 2}}), spec->placements, {4, 6})
          ->id);
  EXPECT_EQ(ids.size(), 9);
  EXPECT_EQ(with_placements(spec, {Shard(-2), Replicate()}), spec);
  EXPECT_EQ(spec->str(), "Float [4, 6] on mesh(dp=2, tp=2) placed [S0, R]");
}

TEST(TensorSpec, DropsUnitsThatMoveNoBoundary) {
  const DeviceMesh mesh = describe_mesh({{"a", 2}, {"b", 2}});
  const auto units = [&](int64_t extent, int64_t a, int64_t b) {
    SpecPtr spec = floats(mesh, {Shard(0, a), Shard(0, b)}, {extent});
    return Sizes{spec->placements[0].unit(), spec->placements[1].unit()};
  };
  EXPECT_EQ(units(8, 2, 2), (Sizes{1, 1}));
  EXPECT_EQ(units(8, 4, 4), (Sizes{1, 4})); // 4,4 then 4,0 instead of 2,2
  EXPECT_EQ(units(10, 2, 1), (Sizes{2, 1})); // 6,4 instead of 5,5
  EXPECT_EQ(units(10, 5, 3), (Sizes{1, 1})); // 5,5 then 3,2
  EXPECT_EQ(units(10, 6, 2), (Sizes{6, 2})); // 6,4 then 4,2 and 2,2
  EXPECT_EQ(
      floats(describe_mesh({{"a", 1}}), {Shard(0, 3)}, {10})->placements[0],
      Placement(Shard(0)));
}

TEST(TensorSpec, NestsAxesThatShareADim) {
  std::vector<Sizes> locals;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const DeviceMesh mesh = describe_mesh({{"a", 2}, {"b", 2}}, rank);
    SpecPtr spec = floats(mesh, {Shard(0), Shard(0)}, {10});
    locals.push_back({spec->local_offsets[0], spec->local_sizes[0]});
    EXPECT_THAT(peer_chunks(spec, 0), ElementsAre(Chunk{0, 5}, Chunk{5, 5}));
    EXPECT_THAT(peer_chunks(spec, 1), ElementsAre(Chunk{0, 3}, Chunk{3, 2}));
    EXPECT_EQ(local_range(*spec, 0, {1, 0}), (Chunk{5, 3}));
  }
  EXPECT_THAT(
      locals, ElementsAre(Sizes{0, 3}, Sizes{3, 2}, Sizes{5, 3}, Sizes{8, 2}));
}

TEST(TensorSpec, KnowsEmptyShardsAndEmptyTensors) {
  const DeviceMesh mesh = describe_mesh({{"dp", 4}}, 3);
  SpecPtr spec = floats(mesh, {Shard(0)}, {5, 2});
  EXPECT_EQ(spec->local_sizes, (Sizes{0, 2}));
  EXPECT_EQ(spec->local_numel, 0);
  EXPECT_EQ(spec->numel(), 10);
  EXPECT_TRUE(spec->sharded);
  SpecPtr empty = floats(mesh, {Shard(1)}, {0, 7});
  EXPECT_EQ(empty->local_sizes, (Sizes{0, 1}));
  EXPECT_EQ(empty->numel(), 0);
  SpecPtr scalar = floats(mesh, {Partial()}, {});
  EXPECT_EQ(scalar->numel(), 1);
  EXPECT_TRUE(scalar->has_partial());
  EXPECT_FALSE(scalar->is_replicated());
  EXPECT_TRUE(floats(mesh, {Replicate()}, {3})->is_replicated());
}

TEST(TensorSpec, RefusesPlacementsThatDoNotFit) {
  const DeviceMesh mesh = describe_mesh({{"dp", 2}});
  const auto error = [&](const Placements& placements, const Sizes& sizes) {
    return usage_error([&] { floats(mesh, placements, sizes); });
  };
  EXPECT_THAT(error({Shard(2)}, {4, 6}), HasSubstr("dims go from -2 to 1"));
  EXPECT_THAT(error({Shard(-3)}, {4, 6}), HasSubstr("Shard(-3)"));
  EXPECT_THAT(error({Shard(0)}, {}), HasSubstr("use Replicate()"));
  EXPECT_THAT(error({Shard(0, 0)}, {4}), HasSubstr("units start at 1"));
  EXPECT_THAT(
      error({Shard(0), Replicate()}, {4}), HasSubstr("give one per axis"));
  EXPECT_THAT(error({Replicate()}, {-4}), HasSubstr("sizes start at 0"));
  const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_THAT(error({Replicate()}, {huge, 3}), HasSubstr("64 bits"));
  EXPECT_EQ(error({Replicate()}, {huge, 3, 0}), "no error");
  EXPECT_THAT(
      usage_error([&] {
        intern(mesh, {Replicate()}, Sizes{4}, Sizes{1, 1}, c10::kFloat);
      }),
      HasSubstr("one stride per dim"));
  EXPECT_THAT(
      usage_error([&] { peer_chunks(floats(mesh, {Replicate()}, {4}), 0); }),
      HasSubstr("not a Shard"));
}

TEST(TensorSpec, IsInternedOnceByManyThreads) {
  const DeviceMesh mesh = describe_mesh({{"dp", 2}});
  constexpr size_t kThreads = 4;
  std::vector<std::vector<SpecPtr>> seen(kThreads);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 200; ++i) {
        seen[t].push_back(floats(mesh, {Shard(0)}, {i, 3}));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (size_t t = 1; t < kThreads; ++t) {
    EXPECT_EQ(seen[t], seen[0]);
  }
}

} // namespace
} // namespace tessera
