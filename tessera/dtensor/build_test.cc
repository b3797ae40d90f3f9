// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

struct Net : torch::nn::Module {
  Net() {
    embedding = register_module(
        "embedding",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 6).padding_idx(1)));
    first = register_module("first", torch::nn::Linear(6, 5));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
    batch = register_module("batch", torch::nn::BatchNorm1d(5));
    second = register_module("second", torch::nn::Linear(5, 3));
    table = register_buffer("table", torch::arange(5).to(torch::kFloat).cos());
    torch::nn::init::orthogonal_(second->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = torch::relu(first(embedding(tokens)));
    x = norm(x) * table;
    x = torch::dropout(x, 0.5, is_training());
    return second(x);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::BatchNorm1d batch{nullptr};
  at::Tensor table;
};

// Every parameter's and buffer's whole value, then a loss with dropout and the
// gradients of one step.
std::vector<at::Tensor> everything(
    const World& world,
    const std::vector<Axis>& axes,
    const PlacementFor& placement_for) {
  const DeviceMesh mesh = make_mesh(world, axes);
  manual_seed(world, 3);
  auto net = build(
      mesh, [] { return std::make_shared<Net>(); }, placement_for);
  std::vector<at::Tensor> result;
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(is_dtensor(item.value())) << item.key();
    result.push_back(full_tensor(item.value().detach()));
  }
  for (const auto& item : net->named_buffers()) {
    result.push_back(full_tensor(item.value()));
  }
  Placements batch(axes.size(), Replicate{});
  batch[0] = Shard(0);
  const at::Tensor tokens =
      distribute(torch::arange(10).remainder(7).view({5, 2}), mesh, batch);
  const at::Tensor loss = net->forward(tokens).pow(2).mean();
  loss.backward();
  result.push_back(full_tensor(loss.detach()));
  for (const auto& item : net->named_parameters()) {
    if (item.value().grad().defined()) {
      result.push_back(full_tensor(item.value().grad()));
    }
  }
  return result;
}

std::vector<at::Tensor> reference() {
  std::vector<at::Tensor> result;
  run_ranks(1, [&](World world) {
    result = everything(world, {{"dp", 1}}, {});
  });
  return result;
}

void expect_equal(
    const std::vector<at::Tensor>& got,
    const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-5, 1e-6))
        << "item " << i << "\n"
        << got[i] << expected[i];
  }
}

TEST(Build, GivesTheSameNumbersOnEveryWorld) {
  const std::vector<at::Tensor> expected = reference();
  for (int64_t n : {2, 3, 4}) {
    run_ranks(n, [&](World world) {
      expect_equal(everything(world, {{"dp", n}}, {}), expected);
    });
  }
}

TEST(Build, GivesTheSameNumbersForEveryPlacement) {
  const std::vector<at::Tensor> expected = reference();
  for (int64_t n : {2, 3, 4}) {
    run_ranks(n, [&](World world) {
      auto shard_all = [](std::string_view /*name*/, c10::IntArrayRef sizes) {
        return Placements{
            sizes.empty() ? Placement(Replicate{}) : Placement(Shard(0))};
      };
      expect_equal(everything(world, {{"dp", n}}, shard_all), expected);
    });
  }
  run_ranks(4, [&](World world) {
    auto columns = [](std::string_view name, c10::IntArrayRef sizes) {
      const bool cut =
          sizes.size() == 2 && name.find("weight") != std::string_view::npos;
      return Placements{
          Replicate{}, cut ? Placement(Shard(1)) : Placement(Replicate{})};
    };
    expect_equal(everything(world, {{"dp", 2}, {"tp", 2}}, columns), expected);
  });
}

TEST(Build, MaterialisesOnlyTheShard) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    auto linear = build(
        mesh,
        [] { return torch::nn::Linear(8, 6); },
        [](std::string_view, c10::IntArrayRef) {
          return Placements{Shard(0)};
        });
    EXPECT_EQ(
        local_of(linear->weight).storage().nbytes(), 3 * 8 * sizeof(float));
    EXPECT_EQ(placements_of(linear->parameters()[0]), Placements{Shard(0)});
  });
}

TEST(Build, SharesOneTensorAmongTiedNames) {
  struct Tied : torch::nn::Module {
    Tied() {
      a = register_module("a", torch::nn::Linear(3, 3));
      tied = register_parameter("tied", a->weight);
    }
    torch::nn::Linear a{nullptr};
    at::Tensor tied;
  };
  run_ranks(2, [](World world) {
    auto tied = build(
        make_mesh(world, {{"dp", 2}}), [] { return std::make_shared<Tied>(); });
    EXPECT_TRUE(tied->a->weight.is_same(tied->tied));
    EXPECT_TRUE(local_of(tied->tied).is_same(local_of(tied->a->weight)));
  });
}

TEST(Build, ThrowingConstructorLeavesTheThreadAsItWas) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    auto failing = [&]() -> std::shared_ptr<Net> {
      throw std::runtime_error("no");
    };
    EXPECT_THROW(build(mesh, failing), std::runtime_error);
    EXPECT_FALSE(is_dtensor(torch::zeros({2})));
    EXPECT_THROW(
        build(
            mesh,
            [&] {
              return build(mesh, [] { return torch::nn::Linear(2, 2); });
            }),
        UsageError);
    EXPECT_FALSE(is_dtensor(torch::zeros({2})));
  });
}

} // namespace
} // namespace tessera
