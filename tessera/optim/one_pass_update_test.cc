// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch_testing.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/optim/one_pass_update.h>
#include <torch/torch.h>

#include <vector>

namespace tessera {
namespace {

constexpr int64_t kElements = 50'021;

at::Tensor normal(int64_t numel, int64_t seed, c10::ScalarType dtype) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::randn({numel}, generator).to(dtype);
}

// Uneven on purpose; the last rank has the rest.
std::vector<int64_t> counts_of(int64_t ranks) {
  std::vector<int64_t> counts(
      static_cast<size_t>(ranks), kElements / ranks / 3);
  counts.back() = kElements - (ranks - 1) * counts[0];
  return counts;
}

// What one rank trains: float32 parameters, or bfloat16 ones with masters.
struct Shard {
  at::Tensor gradients;
  at::Tensor parameters;
  at::Tensor master; // of this rank's part
  at::Tensor first;
  at::Tensor second;
  int64_t begin;
  int64_t numel;

  Shard(const Group& group, c10::ScalarType dtype)
      : gradients(group.allocate({kElements}, dtype)),
        parameters(group.allocate({kElements}, dtype)),
        begin(group.rank() * counts_of(group.size())[0]),
        numel(counts_of(group.size())[static_cast<size_t>(group.rank())]) {
    parameters.copy_(normal(kElements, 1, dtype));
    master = parameters.narrow(0, begin, numel).to(torch::kFloat, false, true);
    first = torch::zeros({numel});
    second = torch::zeros({numel});
  }

  bool has_master() const {
    return parameters.scalar_type() != torch::kFloat;
  }

  // Two runs, the second of another learning rate.
  std::vector<ShardRun> runs(
      const std::vector<torch::optim::AdamWOptions>& options,
      int64_t step) const {
    std::vector<ShardRun> result;
    const int64_t cut = numel / 3;
    for (const int64_t from : {int64_t{0}, cut}) {
      ShardRun run;
      run.begin = begin + from;
      run.numel = from == 0 ? cut : numel - cut;
      run.options = &options[from == 0 ? 0 : 1];
      run.step.step = step;
      run.step.gradient_scale = 0.5;
      if (has_master()) {
        run.step.rounding_seed = 5;
        run.master = master.data_ptr<float>() + from;
      }
      run.states = {
          first.data_ptr<float>() + from,
          second.data_ptr<float>() + from,
          nullptr};
      run.first_element = run.begin;
      result.push_back(run);
    }
    return result;
  }
};

char* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(tensor.data_ptr()) +
      index * static_cast<int64_t>(tensor.element_size());
}

void step_separately(
    const Group& group, Shard& shard, const std::vector<ShardRun>& runs) {
  const auto counts = counts_of(group.size());
  const at::Tensor own =
      torch::empty({shard.numel}, shard.gradients.scalar_type());
  group.reduce_scatter(shard.gradients, own, counts, ReduceOp::kAvg)->wait();
  for (const ShardRun& run : runs) {
    const void* gradient = element(own, run.begin - shard.begin);
    UpdateRange range;
    range.parameter = element(shard.parameters, run.begin);
    range.parameter_type = shard.parameters.scalar_type();
    range.master = run.master;
    range.gradients = {&gradient, 1};
    range.gradient_type = own.scalar_type();
    range.states = run.states;
    range.numel = run.numel;
    range.first_element = run.first_element;
    run_update(UpdateRule::kAdamW, *run.options, run.step, range);
  }
  const at::Tensor part =
      shard.parameters.narrow(0, shard.begin, shard.numel).clone();
  group.all_gather(part, shard.parameters, counts)->wait();
}

void expect_bit_equal(const Group& group) {
  const std::vector<torch::optim::AdamWOptions> options = {
      torch::optim::AdamWOptions(1e-2), torch::optim::AdamWOptions(3e-2)};
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    Shard fused(group, dtype);
    Shard separate(group, dtype);
    for (int64_t step = 1; step <= 3; ++step) {
      const at::Tensor gradient =
          normal(kElements, 10 * group.rank() + step + 1, dtype);
      fused.gradients.copy_(gradient);
      separate.gradients.copy_(gradient);
      update_in_one_pass(
          group,
          UpdateRule::kAdamW,
          fused.gradients,
          fused.parameters,
          /*average=*/true,
          fused.runs(options, step))
          ->wait();
      step_separately(group, separate, separate.runs(options, step));
      EXPECT_TRUE(fused.parameters.equal(separate.parameters));
      EXPECT_TRUE(fused.first.equal(separate.first));
      EXPECT_TRUE(fused.second.equal(separate.second));
      EXPECT_TRUE(fused.master.equal(separate.master));
      EXPECT_TRUE(fused.gradients.equal(gradient));
    }
  }
}

TEST(OnePassUpdate, EqualsReduceScatterUpdateAllGatherOnThreads) {
  for (const int64_t n : {1, 2, 3, 4}) {
    run_ranks(n, [](World world) { expect_bit_equal(world.group()); });
  }
}

TEST(RankBody, DISABLED_OnePassUpdate) {
  const World world = init();
  expect_bit_equal(world.group());
}

TEST(OnePassUpdate, EqualsReduceScatterUpdateAllGatherOnProcesses) {
  for (const int64_t n : {2, 3, 4}) {
    const Outcome outcome = launch_body(n, "OnePassUpdate");
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  }
}

TEST(OnePassUpdate, IsOneCollective) {
  run_ranks(2, [](World world) {
    const std::vector<torch::optim::AdamWOptions> options(2);
    const Shard shard(world.group(), torch::kFloat);
    shard.gradients.fill_(1);
    world.record().reset();
    update_in_one_pass(
        world.group(),
        UpdateRule::kAdamW,
        shard.gradients,
        shard.parameters,
        false,
        shard.runs(options, 1))
        ->wait();
    EXPECT_EQ(world.record().total_count(), 1);
    EXPECT_EQ(world.record().bytes(CollectiveKind::kWithPeers), 8 * kElements);
  });
}

TEST(OnePassUpdate, RefusesRunsOutsideOfTheBuffer) {
  const auto fn = [](World world) {
    const torch::optim::AdamWOptions options;
    const at::Tensor buffer = world.group().allocate({8});
    ShardRun run;
    run.begin = 7;
    run.numel = 2;
    run.options = &options;
    EXPECT_THROW(
        update_in_one_pass(
            world.group(), UpdateRule::kAdamW, buffer, buffer, false, {run}),
        UsageError);
  };
  run_ranks(1, fn);
}

} // namespace
} // namespace tessera
