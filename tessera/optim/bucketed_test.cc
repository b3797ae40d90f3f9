// SPDX-License-Identifier: Apache-2.0
// Flat buffers: what they communicate, what a gradient looks like from outside,
// and that whatever the program does with its gradients trains like one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/optim/optim_testing.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Model;
using testing::Tensors;

constexpr double kTolerance = 1e-6;

ShardOptions bucketed(int64_t bucket_bytes = 1 << 20, bool overlap = false) {
  return {GradientSync::kBucketed, bucket_bytes, overlap};
}

at::Tensor batch_of(int64_t rows, int64_t columns, uint64_t seed = 7) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::rand({rows, columns}, generator);
}

// A model whose parameters are distributed over "dp", and its optimizer.
struct Job {
  Job(const World& world,
      const Model& model,
      const ShardOptions& options,
      const std::vector<Axis>& axes = {},
      const ShardingStage& stage = ShardingStage1("dp"))
      : mesh(make_mesh(
            world,
            axes.empty() ? std::vector<Axis>{{"dp", world.size()}} : axes)),
        forward(model.forward) {
    for (const at::Tensor& value : model.values) {
      params.push_back(
          testing::distributed_leaf(value, mesh, replicated(mesh)));
    }
    optimizer.emplace(testing::sharded_optimizer(
        testing::Rule::kAdamW, params, stage, options));
  }

  at::Tensor distributed(const at::Tensor& batch) const {
    Placements placements = replicated(mesh);
    placements.front() = Shard(0);
    return distribute(batch, mesh, placements);
  }
  void backward(const at::Tensor& batch) {
    forward(params, distributed(batch)).sum().backward();
  }
  // The loss, and if `on_this_rank` something of a parameter that forward does
  // not use, in one backward.
  void backward_with(const at::Tensor& batch, size_t param, bool on_this_rank) {
    const at::Tensor loss = forward(params, distributed(batch)).sum();
    at::Tensor own = to_local(redistribute(loss, replicated(mesh)));
    if (on_this_rank) {
      own = own + to_local(params[param], Placements{Partial()}).square().sum();
    }
    own.backward();
  }
  Tensors values() const {
    Tensors values;
    for (const at::Tensor& param : params) {
      values.push_back(full_tensor(param).detach());
    }
    return values;
  }

  DeviceMesh mesh;
  std::function<at::Tensor(const Tensors&, const at::Tensor&)> forward;
  Tensors params;
  std::optional<ShardedOptimizer> optimizer;
};

// The same on one rank, plain.
struct PlainJob {
  explicit PlainJob(const Model& model) : forward(model.forward) {
    std::ranges::transform(
        model.values, std::back_inserter(params), testing::leaf);
    optimizer = testing::plain_optimizer(testing::Rule::kAdamW, params);
  }
  void backward(const at::Tensor& batch) {
    forward(params, batch).sum().backward();
  }

  std::function<at::Tensor(const Tensors&, const at::Tensor&)> forward;
  Tensors params;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void expect_like(const Job& job, const PlainJob& plain) {
  const Tensors values = job.values();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LT(
        testing::largest_difference({values[i]}, {plain.params[i]}), kTolerance)
        << "parameter " << i;
  }
}

// And two parameters that forward does not use.
Model with_rare_parameters() {
  Model model = testing::uneven_mlp();
  model.values.push_back(torch::full({3}, 0.5));
  model.values.push_back(torch::full({7, 2}, 0.25));
  return model;
}

struct Counts {
  int64_t reduce_scatter;
  int64_t all_gather;
  int64_t all_reduce;
  bool operator==(const Counts&) const = default;
};

Counts counts(const World& world) {
  const Record& record = world.record();
  return {
      record.count(CollectiveKind::kReduceScatter),
      record.count(CollectiveKind::kAllGather),
      record.count(CollectiveKind::kAllReduce)};
}

class Bucketed : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Bucketed, ::testing::Values(1, 2, 3, 4));

TEST_P(Bucketed, StepIsOneReduceScatterAndOneAllGatherPerBucket) {
  Model model{
      {torch::ones({64, 48}), torch::ones({48, 96}), torch::ones({96, 32})},
      [](const Tensors& p, const at::Tensor& x) {
        return x.mm(p[0]).mm(p[1]).mm(p[2]);
      }};
  run_ranks(GetParam(), [&](World world) {
    for (const bool clip : {false, true}) {
      Job job(world, model, bucketed(4 * 64 * 130));
      const auto step = [&] {
        job.backward(batch_of(8, 64));
        world.record().reset();
        if (clip) {
          job.optimizer->clip_grad_norm(1.0);
        }
        job.optimizer->step();
        job.optimizer->zero_grad();
      };
      step();
      step();
      const int64_t buckets = job.optimizer->bucket_statistics().buckets;
      const int64_t moving = world.size() > 1 ? 2 : 0;
      EXPECT_EQ(buckets, moving);
      EXPECT_EQ(
          counts(world), (Counts{moving, moving, world.size() > 1 ? 1 : 0}));
      EXPECT_EQ(
          world.record().total_count(), 2 * moving + (moving > 0 ? 1 : 0));
      // Full buffers: (N - 1) / N of it leaves and reaches each rank.
      const double parameter_bytes =
          4.0 * (64 * 48 + 48 * 96 + 96 * 32) * (world.size() > 1 ? 1 : 0);
      for (const auto kind :
           {CollectiveKind::kReduceScatter, CollectiveKind::kAllGather}) {
        EXPECT_NEAR(
            static_cast<double>(world.record().bytes(kind, "dp")),
            parameter_bytes,
            0.01 * parameter_bytes);
      }
      EXPECT_EQ(
          world.record().bytes(CollectiveKind::kAllReduce),
          moving > 0 ? 8 * (2 + 3) : 0);
    }
  });
}

TEST_P(Bucketed, GradientStaysTheUnreducedPartialAndAccumulatesInPlace) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = batch_of(11, 10);
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed());
    Job reference(world, model, {GradientSync::kReduceScatter});
    for (int step = 0; step < 3; ++step) {
      for (int pass = 0; pass < 2; ++pass) {
        job.backward(batch);
        reference.backward(batch);
      }
      job.optimizer->step();
      reference.optimizer->step();
      for (size_t i = 0; i < job.params.size(); ++i) {
        const at::Tensor& gradient = job.params[i].grad();
        EXPECT_EQ(
            placements_of(gradient), placements_of(reference.params[i].grad()));
        EXPECT_TRUE(torch::allclose(
            local_of(gradient), local_of(reference.params[i].grad())));
      }
      job.optimizer->zero_grad();
      reference.optimizer->zero_grad();
    }
    // One copy per parameter and step, none for the second passes.
    EXPECT_EQ(
        job.optimizer->bucket_statistics().copies,
        3 * static_cast<int64_t>(model.values.size()));
  });
}

TEST_P(Bucketed, ReducedShardsPutTogetherAreTheReducedGradient) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = batch_of(11, 10);
  PlainJob plain(model);
  plain.backward(batch);
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed());
    EXPECT_FALSE(job.optimizer->reduced_shard(job.params[0]).values.defined());
    EXPECT_THROW(job.optimizer->reduced_gradient(job.params[0]), UsageError);
    job.backward(batch);
    job.optimizer->step();
    for (size_t i = 0; i < job.params.size(); ++i) {
      const FlatShard shard = job.optimizer->reduced_shard(job.params[i]);
      const at::Tensor expected = plain.params[i].grad().flatten();
      EXPECT_TRUE(torch::allclose(
          shard.values,
          expected.narrow(0, shard.begin, shard.end - shard.begin)))
          << "parameter " << i;
      const at::Tensor elements =
          torch::full({}, shard.end - shard.begin, torch::kLong);
      world.group().all_reduce(elements, ReduceOp::kSum)->wait();
      const bool whole_everywhere =
          !placements_of(job.params[i].grad()).front().is_partial();
      EXPECT_EQ(
          elements.item<int64_t>(),
          expected.numel() * (whole_everywhere ? world.size() : 1));
    }
  });
}

TEST_P(Bucketed, HandlesOfALocalTensorSeeTheBuffer) {
  const Model model = testing::linear();
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed());
    const at::Tensor weight = local_of(job.params[0]);
    job.backward(batch_of(8, 10));
    job.optimizer->step();
    EXPECT_TRUE(weight.equal(local_of(job.params[0])));
    EXPECT_FALSE(weight.equal(model.values[0]));
    EXPECT_EQ(job.params[0]._version() > 0 && weight._version() > 0, true);
  });
}

// A parameter may have a gradient on some ranks only, from some step on, or
// never; that of the others counts as zero, and without any nothing happens.
TEST_P(Bucketed, RareParametersAreSkippedOrPaddedWithZeros) {
  const Model model = with_rare_parameters();
  const at::Tensor batch = batch_of(12, 10);
  PlainJob plain(model);
  const auto rare = [](const Tensors& p) { return p[6].square().sum(); };
  for (int step = 0; step < 5; ++step) {
    plain.backward(batch);
    if (step % 2 == 1) {
      rare(plain.params).backward(); // one rank's contribution
    }
    plain.optimizer->step();
    plain.optimizer->zero_grad();
  }
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed(300));
    for (int step = 0; step < 5; ++step) {
      job.backward(batch);
      if (step % 2 == 1 && world.rank() == world.size() - 1) {
        at::Tensor& param = job.params[6];
        param.mutable_grad() = wrap_local(
            2 * local_of(param).detach(),
            with_placements(spec_of(param), {Partial()}));
      }
      job.optimizer->step();
      job.optimizer->zero_grad();
    }
    expect_like(job, plain);
    EXPECT_TRUE(job.values()[7].equal(model.values[7])); // never used
  });
}

TEST_P(Bucketed, EveryWayToHandleGradientsTrainsLikeOne) {
  const Model model = testing::uneven_mlp();
  const auto train = [&](auto& job, auto&& own_gradient) {
    for (int step = 0; step < 6; ++step) {
      job.backward(batch_of(11, 10, 1 + static_cast<uint64_t>(step)));
      if (step == 1) { // written to through the parameter
        job.params[0].mutable_grad().mul_(2);
      }
      if (step == 2) { // a tensor of the program's own
        own_gradient(job.params[2]);
      }
      if (step == 3) { // dropped
        job.params[1].mutable_grad().reset();
      }
      job.optimizer->step();
      if (step == 4) { // the same gradients once more
        job.optimizer->step();
      }
      job.optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    }
  };
  PlainJob plain(model);
  train(plain, [](at::Tensor& param) {
    param.mutable_grad() = param.grad() * 3;
  });
  for (const bool overlap : {false, true}) {
    run_ranks(GetParam(), [&](World world) {
      Job job(world, model, bucketed(200, overlap));
      train(job, [](at::Tensor& param) {
        param.mutable_grad() = param.grad() * 3;
      });
      expect_like(job, plain);
    });
  }
}

TEST_P(Bucketed, WriteAfterTheReductionReducesAgain) {
  const Model model = testing::linear();
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed(1 << 20, /*overlap=*/true));
    const at::Tensor batch = batch_of(8, 10);
    for (int step = 0; step < 3; ++step) {
      job.optimizer->zero_grad();
      job.backward(batch);
      if (step == 2) {
        job.params[0].mutable_grad().mul_(2);
      }
      world.record().reset();
      job.optimizer->step();
    }
    EXPECT_EQ(job.optimizer->bucket_statistics().repeated_reductions, 1);
    EXPECT_EQ(counts(world).reduce_scatter, world.size() > 1 ? 1 : 0);
  });
}

// With overlap all reductions of a backward begin in it, but not in the passes
// of an accumulation.
TEST_P(Bucketed, OverlapReducesDuringTheLastBackward) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = batch_of(11, 10);
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed(200, /*overlap=*/true));
    Job reference(world, model, bucketed(200));
    for (int step = 0; step < 3; ++step) {
      world.record().reset();
      {
        const AccumulationScope scope = job.optimizer->accumulate();
        job.backward(batch);
      }
      EXPECT_EQ(counts(world).reduce_scatter, 0);
      job.backward(batch);
      const int64_t buckets = job.optimizer->bucket_statistics().buckets;
      EXPECT_EQ(counts(world).reduce_scatter, world.size() > 1 ? buckets : 0);
      EXPECT_EQ(buckets > 0, step > 0 && world.size() > 1);
      job.optimizer->clip_grad_norm(1.0);
      job.optimizer->step();
      job.optimizer->zero_grad();
      reference.backward(batch);
      reference.backward(batch);
      reference.optimizer->clip_grad_norm(1.0);
      reference.optimizer->step();
      reference.optimizer->zero_grad();
    }
    EXPECT_EQ(job.optimizer->bucket_statistics().repeated_reductions, 0);
    const Tensors expected = reference.values();
    const Tensors values = job.values();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(values[i].equal(expected[i])) << "parameter " << i;
    }
  });
}

// A rank that has all gradients begins to reduce while another still reads its
// loss, or has no gradient for a bucket at all.
TEST_P(Bucketed, OverlapDoesNotDependOnWhatEachRankHasInBetween) {
  const Model model = with_rare_parameters();
  const at::Tensor batch = batch_of(12, 10);
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed(200, /*overlap=*/true));
    Job reference(world, model, bucketed(200));
    for (int step = 0; step < 4; ++step) {
      for (Job* each : {&job, &reference}) {
        each->backward_with(
            batch, 7, step == 0 || world.rank() == step % world.size());
        each->forward(each->params, each->distributed(batch))
            .sum()
            .item<float>(); // a collective of the program
        each->optimizer->step();
        each->optimizer->zero_grad();
      }
    }
    const Tensors expected = reference.values();
    const Tensors values = job.values();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(values[i].equal(expected[i])) << "parameter " << i;
    }
  });
}

TEST_P(Bucketed, ParametersOfSeveralTypesAndLaterGroupsTrainLikeOne) {
  Model model = testing::uneven_mlp();
  model.values.push_back(torch::full({9}, 2.0, torch::kDouble));
  model.values.push_back(torch::full({4}, 1.5));
  const auto inner = model.forward;
  model.forward = [inner](const Tensors& p, const at::Tensor& x) {
    return inner(p, x).sum() * p[6].sum().to(torch::kFloat) + p[7].sum();
  };
  const at::Tensor batch = batch_of(12, 10);
  const auto train = [&](auto& job) {
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        job.optimizer->add_param_group(
            torch::optim::OptimizerParamGroup({job.params.back()}));
      }
      job.optimizer->zero_grad();
      job.backward(batch);
      job.optimizer->step();
    }
  };
  PlainJob plain(model);
  plain.optimizer = testing::plain_optimizer(
      testing::Rule::kAdamW,
      Tensors(plain.params.begin(), plain.params.end() - 1));
  train(plain);
  run_ranks(GetParam(), [&](World world) {
    Job job(world, model, bucketed());
    job.optimizer.emplace(testing::sharded_optimizer(
        testing::Rule::kAdamW,
        Tensors(job.params.begin(), job.params.end() - 1),
        ShardingStage1("dp"),
        bucketed()));
    train(job);
    expect_like(job, plain);
    const BucketStatistics statistics = job.optimizer->bucket_statistics();
    EXPECT_EQ(statistics.buckets, world.size() > 1 ? 2 : 0);
  });
}

TEST(BucketedMesh, TwoAxesNestAndNormsCountEachElementOnce) {
  const Model model = testing::uneven_mlp();
  const at::Tensor batch = batch_of(12, 10);
  PlainJob plain(model);
  plain.backward(batch);
  const double norm = torch::nn::utils::clip_grad_norm_(plain.params, 0.5, 3.0);
  plain.optimizer->step();
  for (const bool both : {false, true}) {
    run_ranks(4, [&](World world) {
      Job job(world, model, bucketed(300), {{"dp", 2}, {"y", 2}});
      const Placements placements{
          Shard(0), both ? Placement(Shard(0)) : Placement(Replicate())};
      job.forward(job.params, distribute(batch, job.mesh, placements))
          .sum()
          .backward();
      EXPECT_NEAR(job.optimizer->clip_grad_norm(0.5, 3.0), norm, 1e-4 * norm);
      world.record().reset();
      job.optimizer->step();
      const int64_t buckets = job.optimizer->bucket_statistics().buckets;
      EXPECT_EQ(
          world.record().count(CollectiveKind::kAllGather, "dp"), buckets);
      EXPECT_EQ(
          world.record().count(CollectiveKind::kAllGather, "y"),
          both ? buckets : 0);
      expect_like(job, plain);
    });
  }
}

// Bit for bit, and without a reduction or a gather of its own; a clipped step
// needs the norm first, and goes the usual way.
TEST_P(Bucketed, OnePassIsReductionUpdateAndGather) {
  const Model model = testing::uneven_mlp();
  run_ranks(GetParam(), [&](World world) {
    ShardOptions options = bucketed(200);
    Job reference(world, model, options);
    options.one_pass = true;
    Job job(world, model, options);
    for (uint64_t step = 0; step < 6; ++step) {
      for (Job* each : {&reference, &job}) {
        each->optimizer->zero_grad();
        each->backward(batch_of(11, 10, step));
        world.record().reset();
        if (step == 3) {
          each->optimizer->clip_grad_norm(0.5);
        }
        each->optimizer->step();
      }
      const int64_t buckets = job.optimizer->bucket_statistics().buckets;
      const int64_t gathered = step == 3 ? buckets : 0;
      if (step > 0) {
        EXPECT_EQ(
            counts(world),
            (Counts{
                gathered, gathered, static_cast<int64_t>(world.size() > 1)}));
        EXPECT_EQ(
            world.record().count(CollectiveKind::kWithPeers),
            buckets - gathered);
      }
      const Tensors expected = reference.values();
      const Tensors values = job.values();
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(values[i].equal(expected[i]))
            << "parameter " << i << ", step " << step;
      }
    }
    options.overlap = true;
    EXPECT_THROW(Job(world, model, options), UsageError);
  });
}

TEST(BucketedOverGloo, OnePassFallsBackToCollectives) {
  const Model model = testing::linear();
  run_ranks(
      2,
      [&](World world) {
        ShardOptions options = bucketed();
        options.one_pass = true;
        Job job(world, model, options);
        for (int step = 0; step < 2; ++step) {
          job.backward(batch_of(8, 10));
          world.record().reset();
          job.optimizer->step();
        }
        EXPECT_EQ(counts(world), (Counts{1, 1, 1}));
      },
      {.backend = "gloo"});
}

class StageTwo : public ::testing::TestWithParam<int64_t> {
 protected:
  static Job job(
      const World& world, const Model& model, int64_t bucket_bytes = 200) {
    return {world, model, bucketed(bucket_bytes), {}, ShardingStage2("dp")};
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, StageTwo, ::testing::Values(1, 2, 3, 4));

TEST_P(StageTwo, TrainsBitForBitAsStageOne) {
  const Model model = testing::uneven_mlp();
  run_ranks(GetParam(), [&](World world) {
    Job two = job(world, model);
    Job one(world, model, bucketed(200));
    for (uint64_t step = 0; step < 5; ++step) {
      for (Job* each : {&one, &two}) {
        each->optimizer->zero_grad();
        each->backward(batch_of(11, 10, step));
        each->optimizer->clip_grad_norm(2.0);
        each->optimizer->step();
      }
    }
    const Tensors expected = one.values();
    const Tensors values = two.values();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(values[i].equal(expected[i])) << "parameter " << i;
    }
  });
}

// zero_grad of the base class is not virtual, so both are tried; gradients that
// were dropped before a step do not come back.
TEST_P(StageTwo, AccumulatesUntilGradientsAreDropped) {
  const Model model = testing::uneven_mlp();
  const auto train = [](auto& job) {
    for (uint64_t step = 0; step < 6; ++step) {
      job.backward(batch_of(11, 10, step));
      if (step % 3 == 1) {
        static_cast<torch::optim::Optimizer&>(*job.optimizer).zero_grad();
      } else if (step % 3 == 2) {
        job.optimizer->zero_grad();
      }
      job.backward(batch_of(12, 10, 10 + step));
      job.backward(batch_of(10, 10, 20 + step));
      job.optimizer->step();
    }
    job.optimizer->step(); // with the same gradients
  };
  PlainJob plain(model);
  train(plain);
  run_ranks(GetParam(), [&](World world) {
    Job two = job(world, model);
    train(two);
    expect_like(two, plain);
  });
}

TEST_P(StageTwo, ReducesEachBucketOnceInEveryBackward) {
  const Model model = testing::uneven_mlp();
  run_ranks(GetParam(), [&](World world) {
    Job two = job(world, model);
    two.backward(batch_of(11, 10));
    two.optimizer->step();
    const int64_t buckets = two.optimizer->bucket_statistics().buckets;
    for (int pass = 0; pass < 3; ++pass) {
      world.record().reset();
      two.backward(batch_of(11, 10));
      EXPECT_EQ(counts(world).reduce_scatter, buckets);
    }
    world.record().reset();
    two.optimizer->step();
    EXPECT_EQ(
        counts(world),
        (Counts{0, buckets, static_cast<int64_t>(world.size() > 1)}));
  });
}

TEST_P(StageTwo, RareParametersAreSkippedOrPaddedWithZeros) {
  const Model model = with_rare_parameters();
  const at::Tensor batch = batch_of(12, 10);
  PlainJob plain(model);
  for (int step = 0; step < 5; ++step) {
    plain.backward(batch);
    if (step % 2 == 1) {
      plain.params[6].square().sum().backward();
    }
    plain.optimizer->step();
    plain.optimizer->zero_grad();
  }
  run_ranks(GetParam(), [&](World world) {
    Job two = job(world, model);
    for (int step = 0; step < 5; ++step) {
      two.backward_with(
          batch, 6, step % 2 == 1 && world.rank() == world.size() - 1);
      two.optimizer->step();
      two.optimizer->zero_grad();
    }
    expect_like(two, plain);
  });
}

TEST(StageTwoMemory, GradientsAreMarkersAndBuffersAreShared) {
  const int64_t rows = 256;
  Model model;
  for (int i = 0; i < 12; ++i) {
    model.values.push_back(torch::eye(rows));
  }
  model.forward = [](const Tensors& p, at::Tensor x) {
    for (const at::Tensor& weight : p) {
      x = x.mm(weight);
    }
    return x;
  };
  run_ranks(2, [&](World world) {
    const int64_t bytes = 4 * rows * rows;
    Job two(world, model, bucketed(bytes), {}, ShardingStage2("dp"));
    for (int step = 0; step < 3; ++step) {
      two.optimizer->zero_grad();
      two.backward(batch_of(8, rows));
      two.optimizer->step();
    }
    EXPECT_EQ(two.optimizer->bucket_statistics().buckets, 12);
    // The shards, two buckets in flight, and one or two being filled.
    EXPECT_LE(
        two.optimizer->memory().gradient_bytes, 12 * bytes / 2 + 4 * bytes);
    at::Tensor gradient = two.params[0].grad();
    EXPECT_EQ(local_of(gradient).storage().nbytes(), 4);
    EXPECT_TRUE(local_of(gradient).isnan().all().item<bool>());
    EXPECT_ANY_THROW(gradient.mul_(2));
    EXPECT_THROW(
        Job(world,
            model,
            {GradientSync::kReduceScatter},
            {},
            ShardingStage2("dp")),
        UsageError);
  });
}

} // namespace
} // namespace tessera
