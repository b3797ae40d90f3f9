// SPDX-License-Identifier: Apache-2.0
// Autograd, modules, optimizers and hooks on distributed tensors do what they
// do on plain ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::seeded;

void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(torch::allclose(got, expected, 1e-5, 1e-6))
      << got << "\nexpected\n"
      << expected;
}

class AutogradOf : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, AutogradOf, testing::Values(1, 2, 3, 4));

// The gradient of f at `value`, on a plain tensor and on distributed ones.
template <typename F>
void check_gradient(
    int64_t ranks, const at::Tensor& value, const Placements& placements, F f) {
  const at::Tensor plain = value.clone().requires_grad_();
  f(plain).backward();
  run_ranks(ranks, [&](World world) {
    for (const Placement& placement : placements) {
      SCOPED_TRACE(placement.str());
      const at::Tensor x =
          distribute(value, line(world), {placement}).requires_grad_();
      f(x).backward();
      ASSERT_TRUE(x.grad().defined());
      if (placement.is_shard()) {
        EXPECT_EQ(placements_of(x.grad()), placements_of(x));
      }
      expect_close(full_tensor(x.grad()), plain.grad());
    }
  });
}

TEST_P(AutogradOf, InPlaceWritesOnViews) {
  check_gradient(
      GetParam(),
      seeded({5, 4}),
      {Replicate{}, Shard(1)},
      [](const at::Tensor& x) {
        at::Tensor y = x * 2;
        y.narrow(0, 1, 2).mul_(3);
        y.select(0, 2).add_(x.select(0, 0));
        y.t().narrow(1, 0, 2).pow_(2);
        return (y * y).sum();
      });
}

TEST(Autograd, RefusesLostWritesToCopiedViews) {
  run_ranks(2, [](World world) {
    const at::Tensor x = distribute(seeded({5, 4}), line(world), {Shard(0)});
    EXPECT_THROW(x.narrow(0, 1, 2).mul_(3), UsageError);
    expect_close(
        full_tensor(x.narrow(0, 1, 2) * 3), seeded({5, 4}).narrow(0, 1, 2) * 3);
  });
}

TEST_P(AutogradOf, ViewsAndReductions) {
  check_gradient(
      GetParam(),
      seeded({6, 4}),
      {Replicate{}, Shard(0), Shard(1)},
      [](const at::Tensor& x) {
        const at::Tensor a = x.view({2, 3, 4}).transpose(0, 1).reshape({3, 8});
        const at::Tensor b = a.unsqueeze(1).expand({3, 2, 8}).softmax(-1);
        return (b.mean({0}) * 3).pow(2).sum() + x.amax() + x.norm() +
            x.log_softmax(0).mean();
      });
}

TEST_P(AutogradOf, SplitsAndCats) {
  check_gradient(
      GetParam(),
      seeded({6, 4}),
      {Replicate{}, Shard(0), Shard(1)},
      [](const at::Tensor& x) {
        const std::vector<at::Tensor> halves = x.chunk(2, 1);
        const std::vector<at::Tensor> rows = x.split(2, 0);
        return (torch::cat({halves[1], halves[0]}, 1) * x).sum() +
            torch::stack({rows[0], rows[2]}).pow(3).sum();
      });
}

TEST_P(AutogradOf, IntermediatesHaveHooksAndRetainedGradients) {
  run_ranks(GetParam(), [](World world) {
    const at::Tensor value = seeded({5, 3});
    const at::Tensor x =
        distribute(value, line(world), {Shard(0)}).requires_grad_();
    at::Tensor y = x * 2;
    y.retain_grad();
    int64_t calls = 0;
    y.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      return gradient * 10;
    });
    (y * y).sum().backward();
    EXPECT_EQ(calls, 1);
    expect_close(full_tensor(y.grad()), value * 40);
    expect_close(full_tensor(x.grad()), value * 80);
  });
}

TEST(Autograd, AccumulatesPartialGradientsWithoutCommunication) {
  run_ranks(3, [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor w =
        distribute(seeded({4, 3}), mesh, {Replicate{}}).requires_grad_();
    const at::Tensor x = distribute(seeded({5, 3}, 8), mesh, {Shard(0)});
    world.record().reset();
    for (int64_t i = 0; i < 3; ++i) {
      torch::linear(x, w).sum().backward();
      EXPECT_TRUE(placements_of(w.grad())[0].is_partial());
    }
    EXPECT_EQ(world.record().total_count(), 0) << world.record().json();
    const at::Tensor plain = seeded({4, 3}).requires_grad_();
    (torch::linear(seeded({5, 3}, 8), plain) * 3).sum().backward();
    expect_close(full_tensor(w.grad()), plain.grad());
  });
}

TEST(Autograd, RefusesBackwardThroughOverwrittenValues) {
  run_ranks(2, [](World world) {
    const at::Tensor x =
        distribute(seeded({4, 2}), line(world), {Shard(0)}).requires_grad_();
    at::Tensor y = x * 1;
    const at::Tensor z = (y * y).sum();
    y.add_(1);
    EXPECT_THROW(z.backward(), c10::Error);
  });
}

TEST(Autograd, WritesThroughDataAreSeenByTheLocal) {
  run_ranks(2, [](World world) {
    const at::Tensor x = distribute(seeded({4, 2}), line(world), {Shard(0)});
    const int64_t before = local_of(x)._version();
    x.data().add_(1);
    EXPECT_GT(local_of(x)._version(), before);
    x.detach().mul_(2);
    expect_close(full_tensor(x), (seeded({4, 2}) + 1) * 2);
  });
}

struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        second(register_module("second", torch::nn::Linear(7, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::tanh(first(x)));
  }
  torch::nn::Linear first;
  torch::nn::Linear second;
};

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor>)>;

// Parameters after some steps of an ordinary torch optimizer.
std::vector<at::Tensor> trained(
    const World& world, const MakeOptimizer& make_optimizer) {
  const DeviceMesh mesh = line(world);
  manual_seed(world, 1);
  auto net = build(mesh, [] { return std::make_shared<Net>(); });
  auto optimizer = make_optimizer(net->parameters());
  for (uint64_t step = 0; step < 4; ++step) {
    const at::Tensor x =
        distribute(seeded({6, 5}, 20 + step), mesh, {Shard(0)});
    const at::Tensor y =
        distribute(seeded({6, 3}, 40 + step), mesh, {Shard(0)});
    optimizer->zero_grad();
    torch::mse_loss(net->forward(x), y).backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer->step();
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : net->parameters()) {
    result.push_back(full_tensor(parameter.detach()));
  }
  return result;
}

void check_optimizer(const MakeOptimizer& make_optimizer) {
  std::vector<at::Tensor> expected;
  run_ranks(1, [&](World world) { expected = trained(world, make_optimizer); });
  for (const int64_t n : {2, 3, 4}) {
    run_ranks(n, [&](World world) {
      const std::vector<at::Tensor> got = trained(world, make_optimizer);
      for (size_t i = 0; i < got.size(); ++i) {
        expect_close(got[i], expected[i]);
      }
    });
  }
}

TEST(Optimizers, OfTorchTrainDistributedParameters) {
  namespace optim = torch::optim;
  check_optimizer([](std::vector<at::Tensor> p) {
    return std::make_unique<optim::SGD>(
        std::move(p), optim::SGDOptions(0.1).momentum(0.9));
  });
  check_optimizer([](std::vector<at::Tensor> p) {
    return std::make_unique<optim::Adam>(
        std::move(p), optim::AdamOptions(0.01));
  });
  check_optimizer([](std::vector<at::Tensor> p) {
    return std::make_unique<optim::AdamW>(
        std::move(p), optim::AdamWOptions(0.01));
  });
  check_optimizer([](std::vector<at::Tensor> p) {
    return std::make_unique<optim::RMSprop>(
        std::move(p), optim::RMSpropOptions(0.01));
  });
  check_optimizer([](std::vector<at::Tensor> p) {
    return std::make_unique<optim::Adagrad>(
        std::move(p), optim::AdagradOptions(0.01));
  });
}

TEST(Errors, NameTheRemedy) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = line(world);
    const at::Tensor x = distribute(seeded({4, 2}), mesh, {Shard(0)});
    auto message = [](auto call) -> std::string {
      try {
        call();
      } catch (const std::exception& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_THAT(
        message([&] { (void)x.data_ptr(); }), testing::HasSubstr("to_local"));
    EXPECT_THAT(
        message([&] { (void)x.storage(); }), testing::HasSubstr("to_local"));
    at::Tensor plain = torch::zeros({4, 2});
    EXPECT_THAT(
        message([&] { plain.copy_(x); }), testing::HasSubstr("full_tensor"));
    EXPECT_THAT(
        message([&] { distribute(x, mesh, {Shard(0)}); }),
        testing::HasSubstr("redistribute"));
    EXPECT_THAT(
        message([&] { redistribute(plain, {Shard(0)}); }),
        testing::HasSubstr("expected a distributed tensor"));
    const at::Tensor uneven = torch::zeros({world.rank() == 0 ? 2 : 5, 2});
    EXPECT_THAT(
        message([&] { from_local(uneven, mesh, {Shard(0)}); }),
        testing::HasSubstr("fit no global shape"));
    EXPECT_THAT(
        message([&] { from_local(uneven, mesh, {Replicate{}}); }),
        testing::HasSubstr("fit no global shape"));
    EXPECT_THAT(
        message([&] {
          distribute(
              torch::full({2}, static_cast<float>(world.rank())),
              mesh,
              {Shard(0)},
              {.own_value = true});
        }),
        testing::HasSubstr("another value"));
  });
}

} // namespace
} // namespace tessera
