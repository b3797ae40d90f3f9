// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/data/test_file.h>
#include <tessera/models/trainer.h>
#include <tessera/optim/sharded_optimizer.h>

#include <memory>

namespace tessera {
namespace {

std::shared_ptr<const TokenFile> text() {
  static const TestFile file([] {
    std::string words;
    for (int i = 0; i < 3000; ++i) {
      words += i % 7 == 0 ? "begat "
          : i % 3 == 0    ? "and the sons of "
                          : "Noah ";
    }
    return words;
  }());
  return std::make_shared<TokenFile>(file.path());
}

TrainerOptions options(int64_t ranks, GradientSync sync) {
  TrainerOptions trainer;
  trainer.model = load_llama_config("tiny");
  trainer.schedule = {.peak = 5e-3, .warmup = 2, .steps = 8};
  trainer.batch = 12 / ranks;
  trainer.sequence = 16;
  trainer.seed = 9;
  trainer.sync = sync;
  return trainer;
}

struct Curve {
  std::vector<double> losses;
  std::vector<double> norms;
  double validation_loss = 0;
};

Curve train(const World& world, const TrainerOptions& trainer_options) {
  Trainer trainer(
      make_mesh(world, {{"dp", world.size()}}), trainer_options, text());
  Curve curve;
  for (int step = 0; step < 8; ++step) {
    const StepReport report = trainer.step();
    curve.losses.push_back(report.loss);
    curve.norms.push_back(report.gradient_norm);
  }
  curve.validation_loss = trainer.validation_loss(2);
  return curve;
}

TEST(Trainer, AnyNumberOfRanksAndEveryModeGiveTheSameLosses) {
  Curve expected;
  run_ranks(1, [&](World world) {
    expected = train(world, options(1, GradientSync::kReduceScatter));
  });
  EXPECT_LT(expected.losses.back(), expected.losses.front() - 0.5);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const GradientSync sync :
         {GradientSync::kImplicit,
          GradientSync::kAllReduce,
          GradientSync::kReduceScatter,
          GradientSync::kBucketed}) {
      run_ranks(ranks, [&](World world) {
        const Curve got = train(world, options(ranks, sync));
        for (size_t i = 0; i < expected.losses.size(); ++i) {
          EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-4)
              << ranks << " ranks, mode " << int(sync) << ", step " << i + 1;
          EXPECT_NEAR(got.norms[i], expected.norms[i], 1e-3)
              << ranks << " ranks, mode " << int(sync) << ", step " << i + 1;
        }
        EXPECT_NEAR(got.validation_loss, expected.validation_loss, 1e-4);
      });
    }
  }
}

TEST(Trainer, AccumulationOverlapAndStagesGiveTheSameLosses) {
  const auto accumulating = [](int64_t ranks) {
    TrainerOptions trainer = options(ranks, GradientSync::kBucketed);
    trainer.passes = 3;
    trainer.bucket_bytes = 20000;
    return trainer;
  };
  Curve expected;
  run_ranks(1, [&](World world) { expected = train(world, accumulating(1)); });
  for (const int64_t ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      for (const bool overlap : {false, true}) {
        run_ranks(ranks, [&](World world) {
          TrainerOptions trainer = accumulating(ranks);
          trainer.stage = stage;
          trainer.overlap = overlap;
          const Curve got = train(world, trainer);
          for (size_t i = 0; i < expected.losses.size(); ++i) {
            EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-4)
                << ranks << " ranks, stage " << stage << ", step " << i + 1;
          }
        });
      }
    }
  }
}

// To the rounding of the activations.
TEST(Trainer, SixteenBitsTrainNearFloat32OnAnyNumberOfRanks) {
  Curve expected;
  run_ranks(1, [&](World world) {
    expected = train(world, options(1, GradientSync::kBucketed));
  });
  for (const auto dtype : {c10::kBFloat16, c10::kHalf}) {
    for (const int64_t ranks : {1, 2, 3}) {
      run_ranks(ranks, [&](World world) {
        TrainerOptions trainer = options(ranks, GradientSync::kBucketed);
        trainer.dtype = dtype;
        const Curve got = train(world, trainer);
        for (size_t i = 0; i < expected.losses.size(); ++i) {
          EXPECT_NEAR(got.losses[i], expected.losses[i], 0.05)
              << ranks << " ranks, " << c10::toString(dtype) << ", step "
              << i + 1;
          EXPECT_NEAR(got.norms[i], expected.norms[i], 0.1 * expected.norms[i])
              << ranks << " ranks, " << c10::toString(dtype) << ", step "
              << i + 1;
        }
      });
    }
  }
}

TEST(Trainer, EveryOptimizerLearnsAlikeOnAnyNumberOfRanks) {
  for (const TrainerOptimizer optimizer :
       {TrainerOptimizer::kAdam,
        TrainerOptimizer::kSgd,
        TrainerOptimizer::kRmsprop,
        TrainerOptimizer::kAdagrad,
        TrainerOptimizer::kLion}) {
    Curve expected;
    for (const int64_t ranks : {1, 3}) {
      run_ranks(ranks, [&](World world) {
        TrainerOptions trainer = options(ranks, GradientSync::kBucketed);
        trainer.optimizer = optimizer;
        trainer.schedule.peak = 1e-3;
        const Curve got = train(world, trainer);
        if (ranks == 1) {
          expected = got;
          EXPECT_LT(got.losses.back(), got.losses.front());
          return;
        }
        for (size_t i = 0; i < expected.losses.size(); ++i) {
          EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-3)
              << "optimizer " << int(optimizer) << ", step " << i + 1;
        }
      });
    }
  }
}

TEST(Trainer, ReportsTimesThatAddUp) {
  run_ranks(2, [&](World world) {
    Trainer trainer(
        make_mesh(world, {{"dp", 2}}),
        options(2, GradientSync::kReduceScatter),
        text());
    trainer.step();
    const StepReport report = trainer.step();
    EXPECT_EQ(report.step, 2);
    EXPECT_EQ(report.tokens, 12 * 16);
    EXPECT_EQ(report.tokens, trainer.tokens_per_step());
    EXPECT_GT(report.seconds.forward_backward, 0);
    EXPECT_GT(report.seconds.communication, 0);
    EXPECT_GT(report.seconds.optimizer, 0);
    EXPECT_LE(
        report.seconds.forward_backward + report.seconds.communication +
            report.seconds.optimizer,
        report.seconds.total);
    EXPECT_DOUBLE_EQ(report.learning_rate, 5e-3);
  });
}

TEST(Trainer, StatesAreCutAlongTheAxis) {
  int64_t whole = 0;
  run_ranks(1, [&](World world) {
    Trainer trainer(
        make_mesh(world, {{"dp", 1}}),
        options(1, GradientSync::kReduceScatter),
        text());
    trainer.step();
    whole = trainer.state_bytes();
  });
  EXPECT_GE(whole, 2 * 4 * load_llama_config("tiny").parameter_count());
  run_ranks(2, [&](World world) {
    Trainer trainer(
        make_mesh(world, {{"dp", 2}}),
        options(2, GradientSync::kReduceScatter),
        text());
    trainer.step();
    EXPECT_NEAR(
        static_cast<double>(trainer.state_bytes()),
        static_cast<double>(whole) / 2,
        static_cast<double>(whole) * 0.005);
  });
}

TEST(Trainer, RefusesSequencesLongerThanTheModel) {
  run_ranks(1, [&](World world) {
    TrainerOptions trainer = options(1, GradientSync::kReduceScatter);
    trainer.model.max_position_embeddings = 8;
    EXPECT_THROW(
        Trainer(make_mesh(world, {{"dp", 1}}), trainer, text()), UsageError);
  });
}

} // namespace
} // namespace tessera
