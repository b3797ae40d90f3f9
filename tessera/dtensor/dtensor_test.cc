// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::range;
using test_tensors::seeded;

class Ranks : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Ranks, testing::Values(1, 2, 3, 4));

TEST_P(Ranks, ShardsComeBackWhole) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    for (const Placement placement :
         {Placement(Replicate{}),
          Placement(Shard(0)),
          Placement(Shard(1)),
          Placement(Partial())}) {
      const at::Tensor value = range({5, 3});
      const at::Tensor tensor = distribute(value, mesh, {placement});
      EXPECT_TRUE(full_tensor(tensor).equal(value)) << placement.str();
    }
  });
}

TEST_P(Ranks, OutFormsOfReductionsWriteTheirResult) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor value = range({5, 3});
    const at::Tensor x = distribute(value, mesh, {Shard(0)});
    at::Tensor out = distribute(torch::zeros({3}), mesh, {Replicate{}});
    torch::mean_out(out, x, 0);
    EXPECT_TRUE(full_tensor(out).allclose(value.mean(0)));
    torch::amax_out(out, x, 0);
    EXPECT_TRUE(full_tensor(out).equal(value.amax(0)));
    torch::amin_out(out, x, 0);
    EXPECT_TRUE(full_tensor(out).equal(value.amin(0)));
  });
}

TEST_P(Ranks, MatmulOfABatchShardRunsNoCollective) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor x = distribute(range({5, 3}), mesh, {Shard(0)});
    const at::Tensor w = distribute(range({3, 4}), mesh, {Replicate{}});
    world.record().reset();
    const at::Tensor y = x.mm(w).relu().add(1.0);
    EXPECT_EQ(world.record().total_count(), 0);
    EXPECT_EQ(placements_of(y), Placements{Shard(0)});
    EXPECT_TRUE(
        full_tensor(y).equal(range({5, 3}).mm(range({3, 4})).relu().add(1.0)));
  });
}

TEST_P(Ranks, WeightGradientsArePartialAndRight) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor xv = seeded({6, 3}, 7);
    const at::Tensor wv = seeded({4, 3}, 8);
    const at::Tensor x = distribute(xv, mesh, {Shard(0)});
    const at::Tensor w = distribute(wv, mesh, {Replicate{}}).requires_grad_();
    torch::linear(x, w).pow(2).sum().backward();
    const at::Tensor pw = wv.clone().requires_grad_();
    torch::linear(xv, pw).pow(2).sum().backward();
    EXPECT_TRUE(placements_of(w.grad())[0].is_partial() || world.size() == 1);
    EXPECT_TRUE(torch::allclose(full_tensor(w.grad()), pw.grad(), 1e-5, 1e-5));
  });
}

} // namespace
} // namespace tessera
