// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/local_cut.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// This rank's part of `value`.
NormPart part_of(
    const at::Tensor& value,
    const DeviceMesh& mesh,
    const Placements& placements) {
  const SpecPtr whole = intern_contiguous(
      mesh, replicated(mesh), value.sizes(), value.scalar_type());
  const SpecPtr part = with_placements(whole, placements);
  return {cut_local(value, *whole, *part), part};
}

TEST(GlobalNorm, IsThatOfOneRankForEveryPlacement) {
  torch::manual_seed(1);
  const at::Tensor a = torch::randn({5, 7});
  const at::Tensor b = torch::randn({3});
  const at::Tensor all = torch::cat({a.flatten(), b});
  const std::vector<Placements> placements = {
      {Replicate(), Replicate()},
      {Shard(0), Replicate()},
      {Replicate(), Shard(1)},
      {Shard(1), Shard(0)},
      {Shard(0), Shard(0)}};
  run_ranks(4, [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"x", 2}, {"y", 2}});
    for (const Placements& placed : placements) {
      const std::vector<NormPart> parts = {
          part_of(a, mesh, placed), part_of(b, mesh, {Shard(0), Replicate()})};
      for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
        const auto expected =
            at::linalg_vector_norm(all.to(torch::kDouble), p).item<double>();
        EXPECT_NEAR(global_norm(world, parts, p), expected, 1e-6 * expected)
            << str(placed) << " p " << p;
      }
    }
  });
}

TEST(GlobalNorm, SpansEmptyPartsAndRanksWithoutAny) {
  run_ranks(3, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 3}});
    EXPECT_DOUBLE_EQ(
        global_norm(
            world, {part_of(torch::tensor({3.F, 4.F}), mesh, {Shard(0)})}, 2),
        5);
    EXPECT_DOUBLE_EQ(global_norm(world, {}, 2), 0);
  });
}

TEST(GlobalNorm, KeepsThePrecisionOfHalfTypesAndLargeSums) {
  run_ranks(1, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
    const at::Tensor half = torch::full({1 << 14}, 3.0, torch::kBFloat16);
    EXPECT_NEAR(
        global_norm(world, {part_of(half, mesh, {Replicate()})}, 2),
        3 * 128,
        1e-3);
  });
}

TEST(GlobalNorm, ClipCoefficientIsTorchs) {
  EXPECT_DOUBLE_EQ(clip_coefficient(1, 0.5), 1);
  EXPECT_NEAR(clip_coefficient(1, 4), 0.25, 1e-6);
  EXPECT_TRUE(std::isnan(clip_coefficient(1, std::nan(""))));
  EXPECT_DOUBLE_EQ(clip_coefficient(1, kInfinity), 0);
}

} // namespace
} // namespace tessera
