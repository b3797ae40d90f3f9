// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/cli/program.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/data/test_file.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

namespace tessera::cli {
namespace {

struct Ran {
  int code;
  std::string out;
  std::string err;
};

Ran run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "tessera");
  std::vector<const char*> argv;
  for (const std::string& argument : arguments) {
    argv.push_back(argument.c_str());
  }
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_program(static_cast<int>(argv.size()), argv.data());
  std::string out = testing::internal::GetCapturedStdout();
  return {code, std::move(out), testing::internal::GetCapturedStderr()};
}

std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

TEST(Program, TellsVersionAndHelp) {
  EXPECT_EQ(run({"--version"}).out, "tessera " TESSERA_VERSION "\n");
  const Ran help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(
      help.out,
      testing::AllOf(
          testing::HasSubstr("train"),
          testing::HasSubstr("run"),
          testing::HasSubstr("bench")));
  EXPECT_EQ(run({}).code, 0);
}

TEST(Program, EndsWithTwoWhenAskedWrongly) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"fly"}, "fly"},
      {{"train"}, "--data"},
      {{"train", "--data", "/no/such/file"}, "/no/such/file"},
      {{"train", "--data", "/no/such/file", "--steps", "0"}, "--steps"},
      {{"train", "--data", "/no/such/file", "--frobnicate"}, "--frobnicate"},
      {{"run", "-n", "2"}, "a program to start"},
      {{"run", "-n", "0", "true"}, "--ranks"},
      {{"comm", "dump"}, "files"},
      {{"bench"}, "subcommand"}};
  for (const auto& [arguments, named] : wrong) {
    const Ran ran = run(arguments);
    EXPECT_EQ(ran.code, 2) << named;
    EXPECT_THAT(
        ran.err,
        testing::AllOf(
            testing::StartsWith("tessera: "), testing::HasSubstr(named)))
        << named;
    EXPECT_EQ(ran.out, "") << named;
  }
}

TEST(Program, SaysWhatWasGotAndWhatIsAllowed) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"train", "--data", "x", "--steps", "0"},
       "--steps: got 0; expected a whole number of at least 1; see tessera "
       "train --help"},
      {{"train", "--data", "x", "--steps", "2.5"},
       "--steps: got 2.5; expected a whole number of at least 1; see tessera "
       "train --help"},
      {{"train", "--data", "x", "--seed", "99999999999999999999"},
       "--seed: got 99999999999999999999, which is beyond what can be counted; "
       "expected a whole number of at least 0; see tessera train --help"},
      {{"train", "--data", "x", "--lr", "nan"},
       "--lr: got nan; expected a number greater than 0; see tessera train "
       "--help"},
      {{"train", "--data", "x", "--val-fraction", "1"},
       "--val-fraction: got 1; expected a number of at least 0 and less than "
       "1; see tessera train --help"},
      {{"train", "--wat"}, "unknown argument --wat; see tessera train --help"},
      {{"fly", "high"}, "unknown argument fly high; see tessera --help"},
      {{"run", "-n", "5000", "true"},
       "--ranks: got 5000; expected a whole number from 1 to 4096; see tessera "
       "run --help"},
      {{"run", "./program"}, "--ranks is required; see tessera run --help"},
      {{"bench", "dispatch", "--calls", "0"},
       "--calls: got 0; expected a whole number of at least 1; see tessera "
       "bench dispatch --help"}};
  for (const auto& [arguments, text] : wrong) {
    const Ran ran = run(arguments);
    EXPECT_EQ(ran.code, 2);
    EXPECT_EQ(ran.err, "tessera: " + text + "\n");
  }
}

// How many lines a file has once it has that many.
size_t await_lines(const std::string& path, size_t lines) {
  while (true) {
    std::ifstream file(path);
    const auto count = static_cast<size_t>(std::count(
        std::istreambuf_iterator<char>(file),
        std::istreambuf_iterator<char>(),
        '\n'));
    if (count >= lines) {
      return count;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST(Program, SaysThatItWasInterruptedAndKeepsTheLog) {
  const TestFile text(std::string(20000, 'x'));
  const TestFile log("");
  std::thread user([&] {
    await_lines(log.path(), 3);
    kill(getpid(), SIGINT);
  });
  const Ran ran = run(
      {"train",
       "--data",
       text.path(),
       "--model",
       "tiny",
       "--steps",
       "1000000",
       "--batch",
       "1",
       "--seq",
       "8",
       "--log",
       log.path()});
  user.join();
  EXPECT_EQ(ran.code, 130);
  const size_t steps = lines_of(log.path()).size();
  EXPECT_GE(steps, 3U);
  EXPECT_EQ(
      ran.err,
      "tessera: train: interrupted after step " + std::to_string(steps) +
          " of 1000000; --log " + log.path() + " keeps those steps\n");
}

TEST(Program, TrainsAndLogsEveryStep) {
  std::string words;
  for (int i = 0; i < 2000; ++i) {
    words += i % 3 == 0 ? "in the " : "beginning ";
  }
  const TestFile text(words);
  const TestFile log("");
  const TestFile json("");
  const Ran ran = run(
      {"train",
       "--data",
       text.path(),
       "--model",
       "tiny",
       "--steps",
       "20",
       "--batch",
       "4",
       "--seq",
       "32",
       "--log",
       log.path(),
       "--json",
       json.path()});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(
      ran.out,
      testing::AllOf(
          testing::HasSubstr("step 20/20"),
          testing::HasSubstr("tokens per s")));
  const auto lines = lines_of(log.path());
  ASSERT_EQ(lines.size(), 20U);
  EXPECT_LT(
      lines.back().at("loss").get<double>(),
      lines.front().at("loss").get<double>() - 0.5);
  EXPECT_EQ(lines.back().at("tokens"), 128);
  EXPECT_TRUE(lines.back().contains("validation_loss"));
  EXPECT_FALSE(lines.front().contains("validation_loss"));
  std::ifstream rows(json.path());
  EXPECT_EQ(nlohmann::json::parse(rows).at(0).at("name"), "train/loss");
  EXPECT_THAT(ran.out, testing::HasSubstr("tiny: 31,904 parameters"));
}

TEST(Program, ComparesTheModesFromTheSameSeed) {
  const TestFile text(std::string(20000, 'x') + "yz");
  const TestFile json("");
  const Ran ran = run(
      {"train",
       "--data",
       text.path(),
       "--model",
       "tiny",
       "--compare",
       "--steps",
       "10",
       "--batch",
       "2",
       "--seq",
       "16",
       "--json",
       json.path()});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(
      ran.out,
      testing::ContainsRegex(
          "kImplicit +kAllReduce +kReduceScatter +kBucketed"));
  std::map<std::string, double> values;
  std::ifstream rows(json.path());
  for (const auto& row : nlohmann::json::parse(rows)) {
    values[row.at("name")] = row.at("value");
  }
  EXPECT_NEAR(
      values.at("train/kImplicit/loss_at_5"),
      values.at("train/kReduceScatter/loss_at_5"),
      1e-5);
  EXPECT_NEAR(
      values.at("train/kImplicit/final_loss"),
      values.at("train/kAllReduce/final_loss"),
      1e-3);
  EXPECT_GT(values.at("train/kAllReduce/optimizer_state"), 0);
}

TEST(Program, AComparisonNeedsAFewSteps) {
  const TestFile text(std::string(20000, 'x'));
  const Ran ran = run(
      {"train",
       "--data",
       text.path(),
       "--model",
       "tiny",
       "--compare",
       "--steps",
       "3"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.err, testing::HasSubstr("expected at least 10"));
}

TEST(Program, RunStartsAFailedJobAgain) {
  const Ran ran = run(
      {"run",
       "-n",
       "1",
       "--restarts",
       "2",
       "/bin/sh",
       "-c",
       "echo run $TESSERA_RESTART; test $TESSERA_RESTART = 1"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.out, "[0] run 0\n[0] run 1\n");
}

TEST(Program, TrainTracesItsCollectives) {
  const TestFile text(std::string(20000, 'x'));
  const TestFile trace("");
  ASSERT_EQ(
      run({"train",
           "--data",
           text.path(),
           "--model",
           "tiny",
           "--steps",
           "1",
           "--batch",
           "2",
           "--seq",
           "16",
           "--trace",
           trace.path()})
          .code,
      0);
  std::ifstream file(trace.path());
  EXPECT_TRUE(nlohmann::json::parse(file).at("traceEvents").is_array());
}

TEST(Program, DumpShowsWhereTheRanksDiffer) {
  const std::string folder =
      testing::TempDir() + "tessera_dump_" + std::to_string(getpid());
  setenv("TESSERA_DUMP_DIR", folder.c_str(), 1);
  run_ranks(2, [](World world) {
    const AskerScope scope(world.rank() == 0 ? "mm" : "addmm");
    EXPECT_THROW(
        world.group().all_reduce(at::ones({3 + world.rank()}), ReduceOp::kSum),
        PeerError);
  });
  unsetenv("TESSERA_DUMP_DIR");
  std::vector<std::string> command{"comm", "dump"};
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    command.push_back(entry.path().string());
  }
  const Ran table = run(command);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(
      table.out,
      testing::AllOf(
          testing::HasSubstr("2 of 2 ranks' files"),
          testing::HasSubstr("first difference: group world [0,1], seq 1: "
                             "shapes must match"),
          testing::ContainsRegex("failed.*mm.*all_reduce.sum. of Float .3."),
          testing::ContainsRegex("failed.*addmm.*of Float .4.")));
  command.emplace_back("--json");
  const auto json = nlohmann::json::parse(run(command).out);
  EXPECT_EQ(json.at("differences").at(0).at("seq"), 1);
  EXPECT_EQ(
      json.at("differences").at(0).at("places").at(1).at("asker"), "addmm");
  const Ran one = run({"comm", "dump", command[2]});
  EXPECT_EQ(one.code, 0);
  EXPECT_THAT(one.out, testing::HasSubstr("no file of ranks ["));
  std::filesystem::remove_all(folder);
}

TEST(Program, DumpRefusesWhatNoRankWrote) {
  const TestFile text("{\"tessera_flight_record\": 1, \"job\": 5}");
  const Ran bad = run({"comm", "dump", text.path()});
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(
      bad.err,
      testing::AllOf(
          testing::HasSubstr(text.path()), testing::HasSubstr("\"job\"")));
  EXPECT_EQ(run({"comm", "dump", "/no/such/file"}).code, 1);
}

TEST(Program, RunPassesArgumentsAndTheCodeOn) {
  EXPECT_EQ(run({"run", "-n", "1", "--", "/bin/sh", "-c", "exit 7"}).code, 7);
  EXPECT_EQ(
      run({"run",
           "-n",
           "2",
           "/bin/sh",
           "-c",
           "test -n \"$RANK\" && test \"$0\" = --help",
           "--help"})
          .code,
      0);
  EXPECT_EQ(
      run({"run",
           "-n",
           "1",
           "/bin/sh",
           "-c",
           "test \"$0 $1\" = '-- -n'",
           "--",
           "-n"})
          .code,
      0);
}

} // namespace
} // namespace tessera::cli
