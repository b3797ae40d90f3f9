// SPDX-License-Identifier: Apache-2.0
// One data-parallel step of each model: nothing falls back to replication, and
// forward and backward run no collective but the loss's scalars.
#include <gtest/gtest.h>
#include <tessera/dtensor/dispatch.h>
#include <tessera/models/gpt.h>
#include <tessera/models/llama.h>
#include <tessera/models/llama_config.h>
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

constexpr int64_t kBatch = 7; // does not divide
constexpr int64_t kSequence = 6;

at::Tensor tokens(int64_t shift) {
  return (torch::arange(kBatch * kSequence) * 31 + shift)
      .remainder(97)
      .view({kBatch, kSequence});
}

// The loss and the gradients' values after one step's forward and backward.
using Step = std::function<at::Tensor(const DeviceMesh&, torch::nn::Module&)>;
using Make = std::function<std::shared_ptr<torch::nn::Module>()>;

at::Tensor cut(const at::Tensor& value, const DeviceMesh& mesh) {
  return distribute(value, mesh, {Shard(0)});
}

std::vector<at::Tensor> run_step(
    const World& world, const Make& make, const Step& step) {
  const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
  manual_seed(world, 5);
  auto model = build(mesh, make);
  reset_fallback_counts(world);
  const at::Tensor loss = step(mesh, *model);
  world.record().reset();
  loss.backward();
  EXPECT_EQ(world.record().total_count(), 0) << world.record().json();
  for (const auto& [op, count] : fallback_counts(world)) {
    ADD_FAILURE() << op << " fell back to replication " << count << " times";
  }
  std::vector<at::Tensor> result{full_tensor(loss.detach())};
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
    result.push_back(full_tensor(item.value().grad()));
  }
  return result;
}

// The forward may reduce the loss's scalars and nothing else.
void expect_only_scalars(const World& world) {
  const Record& record = world.record();
  for (const CollectiveEvent& event : record.events()) {
    EXPECT_EQ(event.kind, CollectiveKind::kAllReduce) << event.asker;
    EXPECT_LE(event.bytes, 8) << event.asker;
  }
  EXPECT_LE(record.total_count(), 2) << record.json();
}

void check(const Make& make, const Step& step) {
  std::vector<at::Tensor> expected;
  run_ranks(1, [&](World world) { expected = run_step(world, make, step); });
  for (const int64_t n : {2, 3, 4}) {
    run_ranks(n, [&](World world) {
      const std::vector<at::Tensor> got = run_step(world, make, step);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-4, 1e-6))
            << "item " << i << " differs by "
            << (got[i] - expected[i]).abs().max().item<float>();
      }
    });
  }
}

TEST(DataParallel, LlamaCommunicatesOnlyItsLoss) {
  check(
      [] { return std::make_shared<Llama>(load_llama_config("tiny")); },
      [](const DeviceMesh& mesh, torch::nn::Module& module) {
        const at::Tensor x = cut(tokens(0), mesh);
        const at::Tensor y = cut(tokens(1), mesh);
        mesh.world().record().reset();
        at::Tensor loss = static_cast<Llama&>(module).loss(x, y);
        expect_only_scalars(mesh.world());
        return loss;
      });
}

TEST(DataParallel, GptCommunicatesOnlyItsLoss) {
  check(
      [] {
        GptConfig config;
        config.context = 16;
        config.hidden = 32;
        return std::make_shared<Gpt>(config);
      },
      [](const DeviceMesh& mesh, torch::nn::Module& module) {
        const at::Tensor x = cut(tokens(0), mesh);
        const at::Tensor y = cut(tokens(1), mesh);
        mesh.world().record().reset();
        at::Tensor loss = static_cast<Gpt&>(module).loss(x, y);
        expect_only_scalars(mesh.world());
        return loss;
      });
}

TEST(DataParallel, MlpCommunicatesOnlyItsLoss) {
  check(
      [] {
        return std::make_shared<Mlp>(std::vector<int64_t>{6, 16, 4}, 0.25);
      },
      [](const DeviceMesh& mesh, torch::nn::Module& module) {
        const at::Tensor value = tokens(0).to(torch::kFloat) / 97;
        const at::Tensor x = cut(value, mesh);
        const at::Tensor y = cut(value.slice(1, 0, 4).contiguous(), mesh);
        mesh.world().record().reset();
        const at::Tensor out = static_cast<Mlp&>(module).forward(x);
        at::Tensor loss = torch::mse_loss(out, y);
        expect_only_scalars(mesh.world());
        return loss;
      });
}

} // namespace
} // namespace tessera
