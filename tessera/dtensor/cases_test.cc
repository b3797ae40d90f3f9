// SPDX-License-Identifier: Apache-2.0
// Inputs that users of other systems reported, with the values that one device
// gives. The names are those systems' issue numbers.
#include <gtest/gtest.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::range;
using test_tensors::seeded;

TEST(Cases, Pytorch162692MeanOfUnevenAndEmptyShards) {
  run_ranks(2, [](World world) {
    EXPECT_EQ(
        distribute(range({3, 4}), line(world), {Shard(0)}).mean().item<float>(),
        5.5F);
  });
  run_ranks(4, [](World world) {
    EXPECT_EQ(
        distribute(range({1, 4}), line(world), {Shard(0)}).mean().item<float>(),
        1.5F);
  });
}

TEST(Cases, Pytorch163193ScalarIsAddedOnce) {
  run_ranks(2, [](World world) {
    EXPECT_EQ(
        (distribute(range({10}), line(world), {Shard(0)}).sum() + 10)
            .item<float>(),
        55.0F);
  });
}

TEST(Cases, Pytorch149768ScalarIsAddedOncePerUpdate) {
  run_ranks(2, [](World world) {
    const at::Tensor local = torch::tensor({{1.0F, 1.0F}, {2.0F, 2.0F}});
    const at::Tensor whole = local * 2;
    at::Tensor x = from_local(local, line(world), {Partial()});
    at::Tensor norm = x.norm() + 1e-6;
    norm += 1;
    EXPECT_NEAR(
        norm.item<float>(), (whole.norm() + 1e-6 + 1).item<float>(), 1e-5);
    at::Tensor sum = x.sum();
    sum += 1;
    EXPECT_NEAR(sum.item<float>(), 13.0F, 1e-5);
  });
}

TEST(Cases, Pytorch163374PartialIsReducedBeforeClamping) {
  run_ranks(3, [](World world) {
    at::Tensor x =
        from_local(torch::full({2}, 48.0F), line(world), {Partial()});
    x.clamp_(at::nullopt, 2.0);
    EXPECT_TRUE(full_tensor(x).equal(torch::full({2}, 2.0F)));
  });
}

TEST(Cases, Pytorch179502ViewAcrossAShardedDim) {
  run_ranks(4, [](World world) {
    const at::Tensor value = seeded({12, 8});
    const at::Tensor x = distribute(value, line(world), {Shard(1)});
    EXPECT_TRUE(full_tensor(x.view({16, 6})).equal(value.view({16, 6})));
  });
}

TEST(Cases, Pytorch143372FlatteningUnevenShardsStaysAView) {
  run_ranks(4, [](World world) {
    const at::Tensor value = seeded({6, 256});
    const at::Tensor x = distribute(value, line(world), {Shard(0)});
    world.record().reset();
    const at::Tensor flat = x.view(-1);
    EXPECT_EQ(world.record().total_count(), 0);
    EXPECT_EQ(flat.numel(), 1536);
    EXPECT_EQ(local_of(flat).data_ptr(), local_of(x).data_ptr());
    EXPECT_TRUE(full_tensor(flat).equal(value.view(-1)));
  });
}

TEST(Cases, Pytorch172932GradientThroughPartialAndBack) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor x =
        distribute(torch::tensor({1.0F, 2.0F}), mesh, {Replicate{}})
            .requires_grad_();
    const at::Tensor local = to_local(redistribute(x, {Partial()}));
    const at::Tensor again = from_local(local, mesh, {Partial()});
    (again.pow(2).sum() * 3).backward();
    EXPECT_TRUE(full_tensor(x.grad()).equal(torch::tensor({6.0F, 12.0F})));
  });
}

TEST(Cases, Pytorch144054And166638ItemReducesFirst) {
  run_ranks(4, [](World world) {
    EXPECT_EQ(
        distribute(torch::ones({8, 8}), line(world), {Shard(0)})
            .norm()
            .item<float>(),
        8.0F);
    const at::Tensor local = torch::tensor(static_cast<float>(world.rank()));
    EXPECT_EQ(from_local(local, line(world), {Partial()}).item<float>(), 6.0F);
  });
}

TEST(Cases, Pytorch185167WeightedAndIgnoredTargets) {
  run_ranks(2, [](World world) {
    const at::Tensor log_p =
        torch::tensor(
            {{0.5F, 0.5F}, {0.5F, 0.5F}, {0.25F, 0.75F}, {0.25F, 0.75F}})
            .log();
    const at::Tensor target = torch::tensor({0, 0, 0, 0});
    const at::Tensor weighted_target = torch::tensor({1, 1, 0, 0});
    const at::Tensor weight = torch::tensor({9.0F, 1.0F});
    const DeviceMesh mesh = line(world);
    const at::Tensor x = distribute(log_p, mesh, {Shard(0)});
    const at::Tensor loss = torch::nll_loss(
        x,
        distribute(weighted_target, mesh, {Shard(0)}),
        distribute(weight, mesh, {Replicate{}}));
    EXPECT_NEAR(loss.item<float>(), 1.3170, 5e-5);
    const at::Tensor ignored = torch::tensor({0, 0, 0, -100});
    const at::Tensor ignoring =
        torch::nll_loss(x, distribute(ignored, mesh, {Shard(0)}));
    EXPECT_NEAR(ignoring.item<float>(), 0.9242, 5e-5);
    (void)target;
  });
}

TEST(Cases, Pytorch110898IntegersThroughPartialAreExact) {
  run_ranks(3, [](World world) {
    const at::Tensor value =
        torch::tensor({int64_t{7}, int64_t{-5}, int64_t{1} << 60});
    const at::Tensor x = distribute(value, line(world), {Replicate{}});
    EXPECT_TRUE(
        full_tensor(redistribute(redistribute(x, {Partial()}), {Replicate{}}))
            .equal(value));
  });
}

TEST(Cases, Paddle63798AddOfDifferentShards) {
  run_ranks(2, [](World world) {
    const at::Tensor a = seeded({16, 32});
    const at::Tensor b = range({16, 32});
    const at::Tensor sum = distribute(a, line(world), {Shard(0)}) +
        distribute(b, line(world), {Shard(1)});
    EXPECT_TRUE(full_tensor(sum).equal(a + b));
  });
}

TEST(Cases, Paddle67729ReshapeGradientComesBackAsPlaced) {
  run_ranks(4, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"x", 2}, {"y", 2}});
    const at::Tensor value = seeded({2, 8, 4, 48});
    const at::Tensor x =
        distribute(value, mesh, {Shard(0), Shard(2)}).requires_grad_();
    const at::Tensor weight = seeded({64, 48});
    const at::Tensor y = x.reshape({64, 48}) *
        distribute(weight, mesh, {Replicate{}, Replicate{}});
    y.sum().backward();
    EXPECT_EQ(placements_of(x.grad()), (Placements{Shard(0), Shard(2)}));
    EXPECT_TRUE(full_tensor(x.grad()).equal(weight.view({2, 8, 4, 48})));
  });
}

} // namespace
} // namespace tessera
