// SPDX-License-Identifier: Apache-2.0
// Parameters of 16 bits. Gradients are sums of small fractions, exact in every
// dtype, so that any number of ranks must give the same bits.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

#include <tuple>

namespace tessera {
namespace {

using testing::Rule;
using testing::Tensors;

constexpr int64_t kShares = 12; // of a gradient, dealt out to the ranks

const std::vector<std::vector<int64_t>> kShapes = {
    {13, 10}, {7}, {}, {1}, {5, 3}};

at::Tensor fractions(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(-3, 4, sizes, generator) / 16;
}

uint64_t seed_of(int64_t step, size_t param, int64_t share) {
  return static_cast<uint64_t>((step * 100 + share) * 100) + param;
}

at::Tensor initial(size_t param, c10::ScalarType dtype) {
  return (fractions(kShapes[param], 7 + param) + 1).to(dtype);
}

// The sum of the shares from `first` on, every `stride`-th of them.
at::Tensor gradient(int64_t step, size_t param, int64_t first, int64_t stride) {
  at::Tensor sum = torch::zeros(kShapes[param]);
  for (int64_t share = first; share < kShares; share += stride) {
    sum += fractions(kShapes[param], seed_of(step, param, share));
  }
  return sum;
}

struct Holder : torch::nn::Module {
  explicit Holder(const Tensors& params) {
    for (size_t i = 0; i < params.size(); ++i) {
      register_parameter(fmt::format("p{}", i), params[i]);
    }
  }
};

struct Setting {
  c10::ScalarType dtype = torch::kBFloat16;
  Rule rule = Rule::kAdamW;
  int stage = 1;
  ShardOptions options = {.bucket_bytes = 200};
};

struct Job {
  Job(const World& of, const Setting& setting)
      : mesh(make_mesh(of, {{"dp", of.size()}})), world(of) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      params.push_back(testing::distributed_leaf(
          initial(i, setting.dtype), mesh, {Replicate()}));
    }
    optimizer.emplace(testing::sharded_optimizer(
        setting.rule,
        params,
        ShardingStage{"dp", setting.stage},
        setting.options));
  }

  void set_gradients(int64_t step) {
    for (size_t i = 0; i < params.size(); ++i) {
      const SpecPtr spec = spec_of(params[i]);
      params[i].mutable_grad() = wrap_local(
          gradient(step, i, world.rank(), world.size()).to(spec->dtype),
          with_placements(spec, {Partial()}));
    }
  }
  void step(int64_t number) {
    optimizer->zero_grad();
    set_gradients(number);
    optimizer->step();
  }
  Tensors values() const {
    Tensors values;
    for (const at::Tensor& param : params) {
      values.push_back(full_tensor(param).detach().clone());
    }
    return values;
  }

  DeviceMesh mesh;
  World world;
  Tensors params;
  std::optional<ShardedOptimizer> optimizer;
};

// float32 masters, written down with plain torch.
struct Reference {
  Reference(c10::ScalarType dtype, Rule rule) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      masters.push_back(testing::leaf(initial(i, dtype).to(torch::kFloat)));
    }
    optimizer = testing::plain_optimizer(rule, masters);
  }
  void step(int64_t number) {
    for (size_t i = 0; i < masters.size(); ++i) {
      masters[i].mutable_grad() = gradient(number, i, 0, 1);
    }
    optimizer->step();
  }

  Tensors masters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void expect_equal(const Tensors& got, const Tensors& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), expected[i].scalar_type());
    EXPECT_TRUE(got[i].equal(expected[i])) << "parameter " << i;
  }
}

class Precision : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Precision, ::testing::Values(1, 2, 3, 4));

TEST_P(Precision, MastersTrainAsFloat32OfPlainTorch) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const Rule rule : {Rule::kAdamW, Rule::kSgdMomentum, Rule::kLion}) {
      for (const int stage : {1, 2}) {
        Reference reference(dtype, rule);
        for (int64_t step = 0; step < 8; ++step) {
          reference.step(step);
        }
        run_ranks(GetParam(), [&](World world) {
          Job job(world, {.dtype = dtype, .rule = rule, .stage = stage});
          for (int64_t step = 0; step < 8; ++step) {
            job.step(step);
          }
          const auto state = job.optimizer->state_dict(Holder(job.params));
          const Tensors values = job.values();
          for (size_t i = 0; i < values.size(); ++i) {
            const auto& entry = state.at(fmt::format("p{}", i));
            const at::Tensor master = entry.tensors.at(kMasterWeight);
            EXPECT_EQ(master.scalar_type(), torch::kFloat);
            EXPECT_LT(
                testing::largest_difference({master}, {reference.masters[i]}),
                1e-6)
                << "parameter " << i << " " << testing::name_of(rule);
            EXPECT_EQ(values[i].scalar_type(), dtype);
            EXPECT_TRUE(values[i].equal(master.to(dtype)));
            for (const auto& [name, tensor] : entry.tensors) {
              EXPECT_EQ(tensor.scalar_type(), torch::kFloat) << name;
            }
          }
        });
      }
    }
  }
}

TEST_P(Precision, EveryWayOfRoundingGivesTheBitsOfOneRank) {
  for (const NarrowUpdate update :
       {NarrowUpdate::kMasterWeights,
        NarrowUpdate::kStochasticRounding,
        NarrowUpdate::kNearest}) {
    Setting setting;
    setting.options.narrow_update = update;
    Tensors expected;
    run_ranks(1, [&](World world) {
      Job job(world, setting);
      for (int64_t step = 0; step < 6; ++step) {
        job.step(step);
      }
      expected = job.values();
    });
    for (const bool one_pass : {false, true}) {
      setting.options.one_pass = one_pass;
      run_ranks(GetParam(), [&](World world) {
        Job job(world, setting);
        for (int64_t step = 0; step < 6; ++step) {
          job.step(step);
        }
        expect_equal(job.values(), expected);
      });
    }
  }
}

TEST_P(Precision, GatherMovesHalfTheBytesAndNothingIsAdded) {
  run_ranks(GetParam(), [](World world) {
    for (const bool narrow : {false, true}) {
      Setting setting;
      setting.options.bucket_bytes = 1 << 20;
      if (narrow) {
        setting.options.reduce_dtype = torch::kBFloat16;
      }
      Job job(world, setting);
      job.step(0);
      job.optimizer->zero_grad();
      job.set_gradients(1);
      world.record().reset();
      job.optimizer->step();
      const Record& record = world.record();
      const int64_t moving = world.size() > 1 ? 1 : 0;
      EXPECT_EQ(record.count(CollectiveKind::kReduceScatter), moving);
      EXPECT_EQ(record.count(CollectiveKind::kAllGather), moving);
      EXPECT_EQ(record.count(CollectiveKind::kAllReduce), moving);
      EXPECT_EQ(record.total_count(), 3 * moving);
      // Each parameter begins at a multiple of 16 elements.
      const int64_t used = 16 * (9 + 1 + 1 + 1 + 1);
      const int64_t unit = 16 * world.size();
      const int64_t elements = (used + unit - 1) / unit * unit * moving;
      EXPECT_EQ(record.bytes(CollectiveKind::kAllGather), 2 * elements);
      EXPECT_EQ(
          record.bytes(CollectiveKind::kReduceScatter),
          (narrow ? 2 : 4) * elements);
      const OptimizerMemory memory = job.optimizer->memory();
      const int64_t part = moving > 0 ? elements / world.size() : used;
      EXPECT_EQ(memory.master_bytes, 4 * part);
      EXPECT_EQ(memory.state_bytes, 2 * memory.master_bytes);
    }
  });
}

// 1 + 2^-9 is no bfloat16: each pass and each rank adds a half of the last bit.
TEST_P(Precision, GradientsAccumulateAndReduceInFloat32) {
  run_ranks(GetParam(), [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    for (const bool narrow : {false, true}) {
      for (const int stage : {1, 2}) {
        at::Tensor param = testing::distributed_leaf(
            torch::ones({33}, torch::kBFloat16), mesh, {Replicate()});
        ShardOptions options;
        if (narrow) {
          options.reduce_dtype = torch::kBFloat16;
        }
        auto optimizer = testing::sharded_optimizer(
            Rule::kSgd, {param}, ShardingStage{"dp", stage}, options);
        const auto backward = [&](double value) {
          // Every rank's own contribution to the sum.
          (to_local(param, Placements{Partial()}) * value).sum().backward();
        };
        backward(1);
        optimizer.step(); // makes the buffer
        optimizer.zero_grad();
        const double small = 1.0 / 512;
        backward(1);
        backward(small);
        if (stage == 1 || world.size() == 1) {
          EXPECT_EQ(
              param.grad().scalar_type(),
              narrow ? torch::kBFloat16 : torch::kFloat);
        }
        optimizer.step();
        const at::Tensor reduced = optimizer.reduced_shard(param).values;
        const auto ranks = static_cast<double>(world.size());
        if (!narrow) {
          EXPECT_EQ(reduced.scalar_type(), torch::kFloat);
          EXPECT_TRUE(
              reduced.equal(torch::full_like(reduced, ranks * (1 + small))));
        } else {
          EXPECT_EQ(reduced.scalar_type(), torch::kBFloat16);
          EXPECT_TRUE(reduced.equal(torch::full_like(reduced, ranks)));
        }
      }
    }
  });
}

TEST(PrecisionState, GoesOnBitEqualInAnotherWorldAndStage) {
  const Setting from;
  Setting to;
  to.stage = 2;
  to.options.bucket_bytes = 1000;
  Tensors expected;
  Tensors half;
  OptimizerState state;
  run_ranks(4, [&](World world) {
    Job job(world, from);
    for (int64_t step = 0; step < 6; ++step) {
      if (step == 3) {
        const auto saved = job.optimizer->state_dict(Holder(job.params));
        const Tensors values = job.values();
        if (world.rank() == 0) {
          state = saved;
          half = values;
        }
      }
      job.step(step);
    }
    const Tensors values = job.values();
    if (world.rank() == 0) {
      expected = values;
    }
  });
  for (const bool state_first : {false, true}) {
    run_ranks(3, [&](World world) {
      // Values and state are loaded in either order, here over other values.
      Job job(world, to);
      job.step(9);
      const auto write_values = [&] {
        const c10::NoGradGuard no_grad;
        for (size_t i = 0; i < half.size(); ++i) {
          job.params[i].copy_(distribute(half[i], job.mesh, {Replicate()}));
        }
      };
      if (!state_first) {
        write_values();
      }
      job.optimizer->load_state_dict(Holder(job.params), state);
      if (state_first) {
        write_values();
      }
      for (int64_t step = 3; step < 6; ++step) {
        job.step(step);
      }
      expect_equal(job.values(), expected);
    });
  }
}

TEST(PrecisionState, StatesWithoutMastersAndMastersWithoutUseAreFine) {
  run_ranks(2, [](World world) {
    Job with(world, {});
    with.step(0);
    OptimizerState state = with.optimizer->state_dict(Holder(with.params));
    Setting nearest;
    nearest.options.narrow_update = NarrowUpdate::kNearest;
    Job without(world, nearest);
    without.step(0);
    without.optimizer->load_state_dict(Holder(without.params), state);
    without.step(1);
    EXPECT_EQ(without.optimizer->memory().master_bytes, 0);
    for (auto& [name, entry] : state) {
      entry.tensors.erase(kMasterWeight);
    }
    with.optimizer->load_state_dict(Holder(with.params), state);
    with.step(1);
  });
}

TEST_P(Precision, MastersFollowWhatTheProgramWrites) {
  Reference reference(torch::kBFloat16, Rule::kSgdMomentum);
  for (int64_t step = 0; step < 4; ++step) {
    reference.step(step);
    if (step == 1) {
      const c10::NoGradGuard no_grad;
      reference.masters[0].fill_(2);
    }
  }
  run_ranks(GetParam(), [&](World world) {
    Job job(world, {.rule = Rule::kSgdMomentum});
    for (int64_t step = 0; step < 4; ++step) {
      job.step(step);
      if (step == 1) {
        const c10::NoGradGuard no_grad;
        job.params[0].fill_(2);
      }
    }
    const auto state = job.optimizer->state_dict(Holder(job.params));
    for (size_t i = 0; i < kShapes.size(); ++i) {
      EXPECT_LT(
          testing::largest_difference(
              {state.at(fmt::format("p{}", i)).tensors.at(kMasterWeight)},
              {reference.masters[i]}),
          1e-6)
          << "parameter " << i;
    }
  });
}

// Steps of a hundredth of the last bit: nearest rounding loses all of them.
TEST(StochasticRounding, KeepsSmallUpdatesOnAverage) {
  for (const bool stochastic : {false, true}) {
    run_ranks(2, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
      at::Tensor param = testing::distributed_leaf(
          torch::ones({4096}, torch::kBFloat16), mesh, {Replicate()});
      ShardOptions options;
      options.narrow_update = stochastic ? NarrowUpdate::kStochasticRounding
                                         : NarrowUpdate::kNearest;
      auto optimizer = shard_optimizer(
          torch::optim::SGD({param}, 4e-5), ShardingStage1("dp"), options);
      for (int step = 0; step < 100; ++step) {
        param.mutable_grad() = wrap_local(
            torch::full({4096}, 0.5, torch::kBFloat16),
            with_placements(spec_of(param), {Partial()}));
        optimizer.step();
      }
      const double mean =
          full_tensor(param).to(torch::kDouble).mean().item<double>();
      EXPECT_NEAR(mean, stochastic ? 1 - 4e-3 : 1, stochastic ? 4e-4 : 0);
      EXPECT_EQ(optimizer.memory().master_bytes, 0);
    });
  }
}

// As a program has it: backward of a model in bfloat16.
TEST_P(Precision, ModelTrainsLikeOneRankOfTheSameDtype) {
  const testing::Model model = testing::uneven_mlp();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor batch =
      torch::rand({12, 10}, generator).to(torch::kBFloat16);
  const auto train = [&](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    Tensors params;
    for (const at::Tensor& value : model.values) {
      params.push_back(testing::distributed_leaf(
          value.to(torch::kBFloat16), mesh, {Replicate()}));
    }
    auto optimizer = testing::sharded_optimizer(
        Rule::kSgdMomentum, params, ShardingStage1("dp"), {.overlap = true});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < 2; ++pass) {
        model.forward(params, distribute(batch, mesh, {Shard(0)}))
            .sum()
            .backward();
      }
      optimizer.clip_grad_norm(1.0);
      optimizer.step();
    }
    Tensors values;
    for (const at::Tensor& param : params) {
      values.push_back(full_tensor(param).detach().to(torch::kFloat));
    }
    return values;
  };
  Tensors expected;
  run_ranks(1, [&](World world) { expected = train(world); });
  run_ranks(GetParam(), [&](World world) {
    // Ranks round their parts of a gradient, not the sum.
    EXPECT_LT(testing::largest_difference(train(world), expected), 0.01);
  });
}

TEST(PrecisionErrors, RefusesDtypesThatAreNoGradients) {
  run_ranks(1, [](World world) {
    Setting setting;
    setting.options.reduce_dtype = torch::kInt;
    EXPECT_THROW(Job(world, setting), UsageError);
    setting.options.reduce_dtype = torch::kFloat;
    setting.options.sync = GradientSync::kReduceScatter;
    EXPECT_THROW(Job(world, setting), UsageError);
  });
}

} // namespace
} // namespace tessera
