// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_train.h>
#include <tessera/data/test_file.h>

#include <algorithm>
#include <sstream>

namespace tessera::cli {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

// A program that trains nothing: steps of `seconds`, for the ranks of a job;
// alone it takes a fifth less. Its loss is that of its rank.
std::string fake(double seconds, int64_t parameters = 10) {
  return "test \"$1 $2\" = '--batch 4' || exit 3\n"
         "echo starting; echo '{\"parameters\": " +
      std::to_string(parameters) +
      "}'\n"
      "while read n; do awk -v n=$n -v rank=${RANK:-0} -v alone=${RANK:-yes} "
      "'BEGIN { s = n * " +
      std::to_string(seconds) +
      R"(; if (alone == "yes") s *= 0.8; printf "{\"seconds\": %f, )"
      R"(\"forward_backward\": %f, \"communication\": %f, \"optimizer\": %f, )"
      R"(\"hidden\": 0.5, \"loss\": %f, \"peak_mib\": 7}\n", )"
      "s, s / 2, s / 4, s / 4, rank }'; done\n";
}

Contestant contestant(
    const std::string& name, const std::string& script, bool peer) {
  const std::vector<std::string> command = {"/bin/sh", script};
  return {.name = name, .peer = peer, .command = command, .alone = command};
}

std::vector<ContestantResult> match(
    const std::vector<Contestant>& contestants, std::ostream& out) {
  BenchTrainOptions options;
  options.pairs = 2;
  options.steps = 4;
  return run_match(
      contestants,
      {"--batch", "4"},
      {.model = "m", .batch = 4, .sequence = 25},
      options,
      out);
}

TEST(BenchTrain, MeasuresRanksAgainstCopies) {
  const TestFile slow(fake(0.5));
  const TestFile fast(fake(0.25));
  std::ostringstream out;
  const auto results = match(
      {contestant("ours", fast.path(), false),
       contestant("peer", slow.path(), true)},
      out);
  ASSERT_EQ(results.size(), 2U);
  EXPECT_NEAR(results[0].tokens_per_s, 800, 1e-3); // 2 x 100 in 0.25 s
  EXPECT_NEAR(results[0].alone_tokens_per_s, 1000, 1e-3);
  EXPECT_NEAR(results[0].efficiency, 0.8, 1e-6);
  EXPECT_NEAR(results[0].step.seconds, 0.25, 1e-6);
  EXPECT_NEAR(results[0].step.communication, 0.0625, 1e-6);
  EXPECT_NEAR(results[0].step.hidden, 0.125, 1e-6);
  EXPECT_NEAR(results[0].alone_forward_backward, 0.1, 1e-6);
  EXPECT_NEAR(results[0].step.loss, 0.5, 1e-6); // of ranks 0 and 1
  EXPECT_NEAR(results[1].tokens_per_s, 400, 1e-3);
  EXPECT_THAT(
      out.str(),
      AllOf(
          HasSubstr("m: 10 parameters; 2 ranks"),
          HasSubstr("pair 2/2: ours 800 peer 400\n")));
}

TEST(BenchTrain, NamesAPeerThatTrainsAnotherModelOrFails) {
  const TestFile good(fake(0.5));
  const TestFile other(fake(0.5, 11));
  const TestFile broken("exit 4\n");
  const TestFile stops("echo '{\"parameters\": 10}'; read steps; exit 5\n");
  const TestFile babbles(
      "echo '{\"parameters\": 10}'; while read steps; do echo '{1'; done\n");
  const std::vector<std::pair<const TestFile*, std::string>> wrong = {
      {&other, "bad has a model of 11 parameters, the others of 10"},
      {&broken, "bad [rank 0/2] ended with code 4"},
      {&stops, "bad [rank 0/2] ended with code 5"},
      {&babbles, "bad [rank 0/2] wrote '{1'"}};
  for (const auto& [file, text] : wrong) {
    std::ostringstream out;
    const std::vector<Contestant> contestants = {
        contestant("ours", good.path(), false),
        contestant("bad", file->path(), true)};
    EXPECT_THAT(
        [&] { match(contestants, out); },
        ThrowsMessage<IoError>(HasSubstr(text)));
  }
}

TEST(BenchTrain, EveryModeRunsOverEveryBackend) {
  BenchTrainOptions options;
  options.modes = {"reduce-scatter", "wide=--sync all-reduce --clip 2"};
  options.peers = {"ddp=python3 peer.py --kind ddp"};
  const auto all = contestants_of(options);
  ASSERT_EQ(all.size(), 5U);
  EXPECT_EQ(all[0].name, "shm/reduce-scatter");
  EXPECT_EQ(all[3].name, "gloo/wide");
  EXPECT_EQ(all[0].alone, all[2].alone); // one set of copies for both
  EXPECT_THAT(
      all[3].command,
      testing::IsSupersetOf(
          {"--sync", "all-reduce", "--clip", "2", "--backend", "gloo"}));
  EXPECT_EQ(all[4].name, "ddp");
  EXPECT_TRUE(all[4].peer);
  EXPECT_EQ(all[4].command.at(2), "python3 peer.py --kind ddp \"$@\"");
  EXPECT_EQ(all[4].alone, all[4].command);
  options.peers_alone = "python3 peer.py";
  EXPECT_EQ(contestants_of(options)[4].alone.at(2), "python3 peer.py \"$@\"");
  EXPECT_EQ(BenchTrainOptions().modes, sync_options());
}

TEST(BenchTrain, SaysWhatAModeAPeerAndAModelLookLike) {
  BenchTrainOptions options;
  options.modes = {"fast"};
  EXPECT_THAT(
      [&] { contestants_of(options); },
      ThrowsMessage<UsageError>(
          AllOf(HasSubstr("'fast'"), HasSubstr("reduce-scatter"))));
  options.modes = {"many=--zero 1 --grad-accum 4"};
  EXPECT_THAT(
      [&] { contestants_of(options); },
      ThrowsMessage<UsageError>(HasSubstr("--mode many: got --grad-accum")));
  options.modes = {};
  for (const char* peer : {"python3", "=python3", "ddp="}) {
    options.peers = {peer};
    EXPECT_THAT(
        [&] { contestants_of(options); },
        ThrowsMessage<UsageError>(HasSubstr("NAME=COMMAND")));
  }
  const BenchModel model = parse_bench_model("llama-19m:2x64");
  EXPECT_EQ(model.model, "llama-19m");
  EXPECT_EQ(model.batch, 2);
  EXPECT_EQ(model.sequence, 64);
  EXPECT_EQ(parse_bench_model("tiny").sequence, 128);
  for (const char* text :
       {"a:2", "a:x3", "a:2x", "a:0x3", "a:2x3x", "a:2x3 "}) {
    EXPECT_THAT(
        [&] { parse_bench_model(text); },
        ThrowsMessage<UsageError>(HasSubstr("NAME:ROWSxTOKENS")))
        << text;
  }
}

std::vector<ContestantResult> results() {
  ContestantResult ours;
  ours.name = "shm/bucketed";
  ours.tokens_per_s = 1250;
  ours.alone_tokens_per_s = 1300;
  ours.efficiency = 0.96;
  ours.alone_forward_backward = 0.15;
  ours.step = {
      .seconds = 0.16,
      .forward_backward = 0.151,
      .communication = 0.004,
      .optimizer = 0.005,
      .hidden = 0.02,
      .loss = 2.5,
      .peak_mib = 400};
  ContestantResult slow = ours;
  slow.name = "fsdp2";
  slow.peer = true;
  slow.tokens_per_s = 800;
  ContestantResult fast = slow;
  fast.name = "ddp";
  fast.tokens_per_s = 1000;
  fast.step.seconds = 0.2;
  return {ours, slow, fast};
}

TEST(BenchTrain, TheTableComparesWithTheBestPeer) {
  const std::string table = match_table(results());
  EXPECT_THAT(
      table,
      AllOf(
          ContainsRegex("tokens/s +to ddp +copies' +efficiency %"),
          ContainsRegex("shm/bucketed +1,250 +1.25x +1,300 +96.0 +160.0 +151.0 "
                        "+4.0 +20.0 +5.0 +150.0 +10.0 +400 +2.500"),
          ContainsRegex("fsdp2 +800 +0.80x"),
          ContainsRegex("ddp +1,000 +1.00x")));
  EXPECT_THAT(match_table({results()[0]}), Not(HasSubstr("to ddp")));
}

TEST(BenchTrain, RowsCompareWithTheBestPeer) {
  const auto rows = match_rows("llama-3m", results());
  const auto find = [&](const std::string& name) {
    return *std::ranges::find(rows, name, &BenchRow::name);
  };
  const BenchRow outside = find("train/llama-3m/shm/bucketed/outside");
  EXPECT_NEAR(outside.value, 10, 1e-9);
  EXPECT_EQ(outside.against, "train/llama-3m/ddp/outside");
  EXPECT_NEAR(outside.ratio, 0.2, 1e-9);
  EXPECT_EQ(find("train/llama-3m/ddp/tokens_per_s").against, "");
  EXPECT_EQ(find("train/llama-3m/fsdp2/tokens_per_s").ratio, 0.8);
}

} // namespace
} // namespace tessera::cli
