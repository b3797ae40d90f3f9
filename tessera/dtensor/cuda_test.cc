// SPDX-License-Identifier: Apache-2.0
// The same training on a mesh of GPUs as on the CPU, in one world. Ranks are
// threads, each with a GPU of its own; skipped where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/devices.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::seeded;

constexpr int64_t kRows = 10; // over 4 ranks: 3, 3, 3, 1
constexpr int64_t kSteps = 3;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::dropout(torch::relu(first(x)), 0.25, is_training()));
  }
  torch::nn::Linear first = nullptr;
  torch::nn::Linear second = nullptr;
};

// Data-parallel steps with dropout; returns the parameters, on the CPU.
std::vector<at::Tensor> train(const DeviceMesh& mesh) {
  manual_seed(mesh.world(), 5);
  const auto net = build(mesh, [] { return std::make_shared<Net>(); });
  torch::optim::AdamW optimizer(net->parameters(), 0.1);
  const at::Tensor x =
      distribute(seeded({kRows, 6}, 1).to(mesh.device()), mesh, {Shard(0)});
  const at::Tensor target =
      distribute(seeded({kRows, 4}, 2).to(mesh.device()), mesh, {Shard(0)});
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(net->forward(x), target).backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
  }
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device(), mesh.device());
    EXPECT_EQ(local_of(parameter).device(), mesh.device());
    parameters.push_back(full_tensor(parameter).detach().cpu());
  }
  return parameters;
}

void expect_alike(
    const std::vector<at::Tensor>& got,
    const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-4, 1e-5))
        << got[i] << "\nexpected\n"
        << expected[i];
  }
}

std::vector<at::Tensor> trained_alone() {
  std::vector<at::Tensor> parameters;
  run_ranks(1, [&](World world) { parameters = train(line(world)); });
  return parameters;
}

// The yardstick itself, on any machine.
TEST(CudaMesh, TheCpuTrainsAlikeOnAnyNumberOfRanks) {
  const auto alone = trained_alone();
  run_ranks(4, [&](World world) { expect_alike(train(line(world)), alone); });
}

TEST(CudaMesh, TrainsAsTheCpuDoesInTheSameWorld) {
  const int64_t gpus = see_devices(c10::kCUDA, 0).count;
  if (gpus == 0) {
    GTEST_SKIP() << "needs a GPU, this machine shows none";
  }
  const auto alone = trained_alone();
  run_ranks(std::min<int64_t>(gpus, 4), [&](World world) {
    const DeviceMesh cpu = line(world);
    const DeviceMesh cuda =
        make_mesh(world, {{"dp", world.size()}}, c10::kCUDA);
    EXPECT_NE(cpu, cuda);
    EXPECT_EQ(cuda.backend_name(0), world.size() > 1 ? "nccl" : "single");
    expect_alike(train(cuda), alone);
    expect_alike(train(cpu), alone);
  });
}

TEST(CudaMesh, ATensorElsewhereIsAnErrorThatSaysWhereTo) {
  const DeviceMesh mesh = describe_mesh({{"dp", 2}}, 0, "nccl", c10::kCUDA);
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { from_local(at::ones({2}), mesh, {Shard(0)}); },
           [&] { distribute(at::ones({2}), mesh, {Shard(0)}); }}) {
    EXPECT_THAT(
        call,
        testing::ThrowsMessage<UsageError>(testing::AllOf(
            testing::HasSubstr("got a tensor on cpu"),
            testing::HasSubstr("is on cuda:0; move it there"))));
  }
}

} // namespace
} // namespace tessera
