// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/cli/train_options.h>
#include <tessera/data/test_file.h>
#include <tessera/optim/sharded_optimizer.h>

#include <CLI/CLI.hpp>

namespace tessera::cli {
namespace {

const TestFile& text() {
  static const TestFile file(std::string(20000, 'x'));
  return file;
}

TrainOptions parse(std::vector<std::string> arguments) {
  TrainOptions options;
  CLI::App app;
  declare_train_options(app, options);
  std::reverse(
      arguments.begin(), arguments.end()); // CLI11 wants them last first
  app.parse(arguments);
  return options;
}

TrainPlan plan(
    std::vector<std::string> arguments,
    std::optional<int64_t> world_size = std::nullopt) {
  arguments.insert(arguments.begin(), {"--data", text().path()});
  return make_plan(parse(std::move(arguments)), world_size);
}

std::string error_of(
    std::vector<std::string> arguments,
    std::optional<int64_t> world_size = std::nullopt) {
  try {
    plan(std::move(arguments), world_size);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(TrainOptions, FillsInWhatDependsOnTheSteps) {
  const TrainPlan p = plan({"--steps", "100"});
  EXPECT_EQ(p.options.warmup, 5);
  EXPECT_EQ(p.options.validation_every, 10);
  EXPECT_EQ(p.ranks, 1);
  EXPECT_EQ(p.axes.at(0).name, "dp");
  EXPECT_EQ(plan({"--warmup", "0"}).options.warmup, 0);
  EXPECT_LT(plan({"--compare"}).options.steps, plan({}).options.steps);
}

TEST(TrainOptions, TheWorldComesFromLauncherRanksOrMesh) {
  EXPECT_EQ(plan({"--ranks", "3"}).ranks, 3);
  EXPECT_EQ(plan({"--mesh", "dp=4"}).ranks, 4);
  EXPECT_EQ(plan({"--mesh", "pp=1,dp=2", "--ranks", "2"}).axes.size(), 2U);
  EXPECT_EQ(plan({}, 5).axes.at(0).size, 5);
  EXPECT_EQ(plan({"--mesh", "dp=-1"}, 5).axes.at(0).size, 5);
  EXPECT_EQ(plan({"--mesh", "dp=-1", "--ranks", "3"}).axes.at(0).size, 3);
  EXPECT_EQ(plan({"--mesh", "dp=-1"}).ranks, 1);
  EXPECT_EQ(plan({"--ranks", "5"}, 5).ranks, 5);
}

TEST(TrainOptions, NamesEverySynchronisationMode) {
  EXPECT_EQ(plan({}).trainer.sync, GradientSync::kDefault);
  EXPECT_EQ(plan({"--sync", "implicit"}).trainer.sync, GradientSync::kImplicit);
  EXPECT_EQ(
      plan({"--sync", "all-reduce"}).trainer.sync, GradientSync::kAllReduce);
  EXPECT_EQ(
      plan({"--sync", "reduce-scatter"}).trainer.sync,
      GradientSync::kReduceScatter);
  EXPECT_EQ(plan({"--sync", "bucketed"}).trainer.sync, GradientSync::kBucketed);
  EXPECT_EQ(plan({"--bucket-mb", "3"}).trainer.bucket_bytes, 3 << 20);
  EXPECT_EQ(plan({"--zero", "2"}).trainer.stage, 2);
  EXPECT_EQ(plan({"--grad-accum", "3"}).trainer.passes, 3);
  EXPECT_TRUE(plan({"--overlap"}).trainer.overlap);
  EXPECT_THROW(plan({"--sync", "fast"}), CLI::ValidationError);
}

TEST(TrainOptions, NamesDtypesAndOptimizers) {
  EXPECT_EQ(plan({}).trainer.dtype, c10::kFloat);
  EXPECT_EQ(plan({"--dtype", "bfloat16"}).trainer.dtype, c10::kBFloat16);
  EXPECT_EQ(plan({"--dtype", "float16"}).trainer.dtype, c10::kHalf);
  EXPECT_EQ(plan({}).trainer.optimizer, TrainerOptimizer::kAdamW);
  EXPECT_EQ(
      plan({"--optimizer", "lion"}).trainer.optimizer, TrainerOptimizer::kLion);
  EXPECT_EQ(
      plan({"--optimizer", "sgd"}).trainer.optimizer, TrainerOptimizer::kSgd);
  EXPECT_THROW(plan({"--dtype", "int8"}), CLI::ValidationError);
  EXPECT_THROW(plan({"--optimizer", "lbfgs"}), CLI::ValidationError);
  EXPECT_THAT(
      error_of({"--dtype", "bfloat16", "--sync", "implicit"}),
      testing::HasSubstr("take that, without --compare, or float32"));
}

TEST(TrainOptions, SaysWhatToDoAboutAWorldThatDoesNotFit) {
  EXPECT_THAT(
      error_of({"--mesh", "dp=3", "--ranks", "2"}),
      testing::HasSubstr("needs 3 ranks, world size is 2; try dp=2"));
  EXPECT_THAT(
      error_of({"--ranks", "3"}, 2), testing::HasSubstr("leave --ranks out"));
  EXPECT_THAT(error_of({"--mesh", "tp=2"}), testing::HasSubstr("try dp=2"));
  EXPECT_THAT(
      error_of({"--mesh", "dp=2,tp=2"}), testing::HasSubstr("try dp=4"));
  EXPECT_THAT(
      error_of({"--mesh", "dp=2,tp=-1", "--ranks", "6"}),
      testing::HasSubstr("axis tp has 3 ranks"));
  EXPECT_THAT(
      error_of({"--mesh", "dp=-1,pp=2", "--ranks", "3"}),
      testing::HasSubstr("a multiple of 2 ranks"));
}

TEST(TrainOptions, SaysWhatToDoAboutFilesAndSizes) {
  EXPECT_THAT(error_of({"--model", "huge"}), testing::HasSubstr("presets are"));
  EXPECT_THAT(
      error_of({"--seq", "4096"}),
      testing::HasSubstr("max_position_embeddings is 2048"));
  EXPECT_THAT(
      error_of({"--seq", "2000"}), testing::HasSubstr("a shorter sequence"));
  EXPECT_THAT(
      error_of({"--log", "/no/such/folder/log"}),
      testing::HasSubstr("--log /no/such/folder/log"));
}

TEST(TrainOptions, RefusesNumbersThatMakeNoSense) {
  for (const char* option :
       {"--batch", "--seq", "--steps", "--ranks", "--lr", "--val-every"}) {
    EXPECT_THROW(parse({"--data", "x", option, "0"}), CLI::ValidationError)
        << option;
    EXPECT_THROW(parse({"--data", "x", option, "many"}), CLI::ParseError)
        << option;
  }
  for (const char* option :
       {"--clip", "--weight-decay", "--warmup", "--seed"}) {
    EXPECT_THROW(parse({"--data", "x", option, "-1"}), CLI::ValidationError)
        << option;
  }
  EXPECT_THROW(
      parse({"--data", "x", "--val-fraction", "1.5"}), CLI::ValidationError);
  EXPECT_THROW(parse({"--batch", "2"}), CLI::RequiredError);
}

} // namespace
} // namespace tessera::cli
