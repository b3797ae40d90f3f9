// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/dtensor/philox.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

// The first vectors of Random123's known-answer file for philox4x32-10.
TEST(Philox, GivesTheKnownAnswers) {
  const std::array<uint32_t, 4> zeros = Philox(0, 0, 0)(0);
  EXPECT_EQ(
      zeros,
      (std::array<uint32_t, 4>{
          0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

using Draw = std::function<at::Tensor(const at::Tensor&)>;

const std::vector<std::pair<std::string, Draw>>& draws() {
  static const std::vector<std::pair<std::string, Draw>> all = {
      {"uniform_", [](at::Tensor x) { return x.uniform_(-1, 2); }},
      {"normal_", [](at::Tensor x) { return x.normal_(1, 3); }},
      {"exponential_", [](at::Tensor x) { return x.exponential_(2); }},
      {"bernoulli_", [](at::Tensor x) { return x.bernoulli_(0.3); }},
      {"bernoulli",
       [](const at::Tensor& x) { return (x * 0 + 0.4).bernoulli(); }},
      {"random_", [](at::Tensor x) { return x.random_(3, 90); }},
      {"rand_like", [](const at::Tensor& x) { return at::rand_like(x); }},
      {"randn_like", [](const at::Tensor& x) { return at::randn_like(x); }},
      {"dropout",
       [](const at::Tensor& x) { return at::dropout(x + 1, 0.4, true); }},
  };
  return all;
}

std::vector<at::Tensor> drawn(
    const World& world,
    const std::vector<Axis>& axes,
    const Placements& placements,
    at::ScalarType dtype) {
  const DeviceMesh mesh = make_mesh(world, axes);
  manual_seed(world, 11);
  std::vector<at::Tensor> result;
  for (const auto& [name, draw] : draws()) {
    const at::Tensor x =
        distribute(torch::zeros({7, 5}, dtype), mesh, placements);
    result.push_back(full_tensor(draw(x)));
  }
  return result;
}

TEST(Random, NumbersDependOnNoWorldAndNoPlacement) {
  for (const at::ScalarType dtype :
       {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    std::vector<at::Tensor> expected;
    run_ranks(1, [&](World world) {
      expected = drawn(world, {{"dp", 1}}, {Replicate{}}, dtype);
    });
    auto check = [&](World world,
                     const std::vector<Axis>& axes,
                     const Placements& placements) {
      const std::vector<at::Tensor> got = drawn(world, axes, placements, dtype);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(got[i].equal(expected[i]))
            << draws()[i].first << " placed " << str(placements);
      }
    };
    for (const int64_t n : {2, 3, 4}) {
      run_ranks(n, [&](World world) {
        check(world, {{"dp", n}}, {Replicate{}});
        check(world, {{"dp", n}}, {Shard(0)});
        check(world, {{"dp", n}}, {Shard(1)});
        check(world, {{"dp", n}}, {Partial{}});
      });
    }
    run_ranks(4, [&](World world) {
      check(world, {{"x", 2}, {"y", 2}}, {Shard(1), Shard(0)});
      check(world, {{"x", 2}, {"y", 2}}, {Shard(0), Shard(0)});
    });
  }
}

TEST(Random, DrawsHaveTheRightMoments) {
  run_ranks(1, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 1}});
    manual_seed(world, 4);
    at::Tensor x = distribute(torch::zeros({400, 500}), mesh, {Replicate{}});
    x.uniform_(0, 1);
    EXPECT_NEAR(x.mean().item<double>(), 0.5, 0.005);
    EXPECT_NEAR(x.var().item<double>(), 1.0 / 12, 0.002);
    x.normal_(0, 1);
    EXPECT_NEAR(x.mean().item<double>(), 0, 0.01);
    EXPECT_NEAR(x.var().item<double>(), 1, 0.02);
    EXPECT_NEAR(x.pow(4).mean().item<double>(), 3, 0.1);
    x.bernoulli_(0.25);
    EXPECT_NEAR(x.mean().item<double>(), 0.25, 0.005);
  });
}

TEST(Random, OperatorsWithoutARuleDrawAlikeOnAllRanks) {
  run_ranks(3, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 3}});
    const at::Tensor weights = distribute(torch::ones({50}), mesh, {Shard(0)});
    const at::Tensor chosen = at::multinomial(weights, 20);
    const at::Tensor noisy = at::rrelu(weights * -1, 0.1, 0.9, true);
    for (const at::Tensor& x : {chosen, noisy}) {
      const at::Tensor mine = local_of(redistribute(x, {Replicate{}}));
      EXPECT_NO_THROW(
          distribute(mine, mesh, {Replicate{}}, {.own_value = true}));
    }
    EXPECT_FALSE(
        full_tensor(at::multinomial(weights, 20)).equal(full_tensor(chosen)));
  });
}

TEST(Random, TheStreamCanBePutBack) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    const at::Tensor x = distribute(torch::zeros({6}), mesh, {Shard(0)});
    manual_seed(world, 9);
    const RandomState before = random_state(world);
    const at::Tensor first = full_tensor(at::rand_like(x));
    const at::Tensor second = full_tensor(at::rand_like(x));
    EXPECT_FALSE(first.equal(second));
    set_random_state(world, before);
    EXPECT_TRUE(full_tensor(at::rand_like(x)).equal(first));
    manual_seed(world, 10);
    EXPECT_FALSE(full_tensor(at::rand_like(x)).equal(first));
  });
}

} // namespace
} // namespace tessera
