// SPDX-License-Identifier: Apache-2.0
// The launcher: what ranks get from it, how they end, and that nothing stays
// behind. process_test.cc has what ranks do with each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch_output.h>
#include <tessera/comm/launch_testing.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(Launch, GivesEachRankItsVariablesAndPrefixesItsLines) {
  unsetenv("OMP_NUM_THREADS");
  const Outcome outcome = launch_shell(
      2,
      "echo $RANK/$WORLD_SIZE/$LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR; test "
      "$MASTER_PORT -gt 0; test $OMP_NUM_THREADS -ge 1; printf unfinished");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(
      outcome.out,
      AllOf(
          HasSubstr("[0] 0/2/0/2 127.0.0.1\n"),
          HasSubstr("[1] 1/2/1/2 127.0.0.1\n")));
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("[0] unfinished\n"), HasSubstr("[1] unfinished\n")));
}

TEST(Launch, ReturnsTheFirstFailingCodeAndStopsTheOthers) {
  const Outcome outcome = launch_shell(
      3, "if [ $RANK = 1 ]; then echo bad >&2; exit 7; fi; exec sleep 600");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(
      outcome.err,
      AllOf(
          HasSubstr("[1] bad\n"),
          HasSubstr("ended with code 7; stopping the job")));
}

TEST(Launch, KillsARankThatIgnoresTerm) {
  const Outcome outcome = launch_shell(
      2,
      "trap '' TERM; if [ $RANK = 0 ]; then exit 5; fi; while :; do sleep 1; "
      "done");
  EXPECT_EQ(outcome.code, 5);
}

TEST(Launch, SaysThatACommandCannotBeRun) {
  const Outcome outcome =
      launch_and_capture({.command = {"/nowhere/to/be/found"}, .ranks = 2});
  EXPECT_EQ(outcome.code, 127);
  EXPECT_THAT(
      outcome.err,
      AllOf(HasSubstr("/nowhere/to/be/found"), HasSubstr("No such file")));
}

TEST(Launch, PassesSignalsOn) {
  const std::string ready =
      testing::TempDir() + "tessera_ready_" + std::to_string(getpid());
  setenv("TESSERA_TEST_READY", ready.c_str(), 1);
  const Outcome outcome = launch_shell(
      2,
      "trap 'echo stopping; exit 0' TERM; if [ $RANK = 1 ]; then touch "
      "$TESSERA_TEST_READY; else while [ ! -e $TESSERA_TEST_READY ]; do sleep "
      "0.05; done; kill -TERM $PPID; fi; while :; do sleep 0.05; done");
  unlink(ready.c_str());
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(
      outcome.out, AllOf(HasSubstr("[0] stopping"), HasSubstr("[1] stopping")));
}

TEST(Launch, LeavesRankZeroRawAndShowsAnothersErrorsWhenItFails) {
  const Outcome outcome = launch_and_capture(
      {.command =
           {"sh",
            "-c",
            "echo hello $RANK; if [ $RANK = 1 ]; then echo broken >&2; exit 4; "
            "fi; exec sleep 600"},
       .ranks = 2,
       .output = LaunchOutput::kRankZeroOnly});
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.out, Not(HasSubstr("hello 1")));
  EXPECT_THAT(outcome.err, HasSubstr("broken"));
}

TEST(Launch, RefusesNonsense) {
  EXPECT_THROW(launch({.command = {}, .ranks = 1}), UsageError);
  EXPECT_THROW(launch({.command = {"true"}, .ranks = 0}), UsageError);
}

TEST(LastLines, AreTheLastOnes) {
  EXPECT_EQ(last_lines("", 3), "");
  EXPECT_EQ(last_lines("a", 3), "  a\n");
  EXPECT_EQ(last_lines("a\nb\n", 3), "  a\n  b\n");
  EXPECT_EQ(last_lines("a\nb\nc\n\n", 2), "  b\n  c\n");
  EXPECT_EQ(last_lines("a\n\nc", 2), "  \n  c\n");
}

TEST(Launch, TellsInTheEndWhoFailedFirstAndItsLastLines) {
  const Outcome outcome = launch_shell(
      3,
      "if [ $RANK = 1 ]; then echo before; echo the reason >&2; exit 7; fi; "
      "trap 'echo stopped $RANK; exit 5' TERM; while :; do sleep 0.05; done");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(
      outcome.err,
      testing::ContainsRegex("the job failed after [0-9.]+ s; first: rank 1 "
                             ".pid [0-9]+. ended with code 7; its last "
                             "lines:\n(  before\n)?  the reason\n"));
  EXPECT_THAT(outcome.err, Not(HasSubstr("  stopped")));
}

TEST(Launch, StartsAFailedJobAgain) {
  const std::string script =
      "echo run $TESSERA_RESTART of rank $RANK; test $TESSERA_RESTART = 2";
  const Outcome well = launch_shell(2, script, 5);
  EXPECT_EQ(well.code, 0);
  EXPECT_THAT(
      well.out,
      AllOf(
          HasSubstr("run 0 of rank"),
          HasSubstr("run 1 of rank"),
          HasSubstr("run 2 of rank 0"),
          HasSubstr("run 2 of rank 1"),
          Not(HasSubstr("run 3"))));
  EXPECT_THAT(well.err, HasSubstr("starting the job again, 2 of 5"));
  const Outcome badly = launch_shell(2, script, 1);
  EXPECT_EQ(badly.code, 1);
  EXPECT_THAT(badly.out, Not(HasSubstr("run 2")));
}

TEST(Launch, DoesNotStartAgainWhatTheUserStoppedOrWhatCannotBeRun) {
  const Outcome stopped = launch_shell(
      1, "echo run; kill -TERM $PPID; while :; do sleep 0.05; done", 3);
  EXPECT_EQ(stopped.code, 128 + SIGTERM);
  EXPECT_EQ(stopped.out, "[0] run\n");
  const Outcome nothing = launch_and_capture(
      {.command = {"/nowhere/to/be/found"}, .ranks = 1, .restarts = 3});
  EXPECT_EQ(nothing.code, 127);
  EXPECT_THAT(nothing.err, Not(HasSubstr("again")));
}

// Processes whose environment holds TESSERA_TEST_MARK=`mark`.
std::vector<pid_t> marked(const std::string& mark) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) {
      continue;
    }
    std::ifstream file(entry.path() / "environ", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find("TESSERA_TEST_MARK=" + mark) != std::string::npos) {
      found.push_back(std::stoi(name));
    }
  }
  return found;
}

// A rank with children of every kind: in its process group, in a session of
// their own, and left by their parent.
constexpr const char* kWithChildren =
    "sleep 600 & setsid sleep 601 & (setsid sh -c 'sleep 602 & sleep 603' &); "
    "(sleep 604 &); ";

// A launcher in a process of its own, so that it can be killed.
struct Launcher {
  explicit Launcher(const std::string& script)
      : mark(std::to_string(getpid()) + script.substr(script.size() - 9)) {
    pid = fork();
    if (pid == 0) {
      const int code = launch(
          {.command = {"bash", "-c", script},
           .ranks = 2,
           .environment = {{"TESSERA_TEST_MARK", mark}},
           .grace = std::chrono::seconds(1)});
      std::_Exit(code);
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher() {
    if (pid > 0) {
      wait();
    }
  }

  // Waits until as many marked processes are there. Returns whether they came.
  bool await(std::size_t least, std::size_t most) const {
    for (int i = 0; i < 600; ++i) {
      const std::size_t there = marked(mark).size();
      if (there >= least && there <= most) {
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }

  int wait() {
    int status = 0;
    waitpid(pid, &status, 0);
    pid = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  std::string mark;
  pid_t pid;
};

TEST(Launch, LeavesNoOrphanWhenARankFails) {
  setenv("TESSERA_TEST_MARK", "orphans", 1);
  const Outcome outcome =
      launch_shell(2, std::string(kWithChildren) + "sleep 0.3; exit 3");
  EXPECT_EQ(outcome.code, 3);
  unsetenv("TESSERA_TEST_MARK");
  EXPECT_THAT(marked("orphans"), testing::IsEmpty());
}

TEST(Launch, LeavesNoOrphanWhenItIsKilled) {
  Launcher launcher(std::string(kWithChildren) + "exec sleep 605");
  EXPECT_TRUE(launcher.await(12, 100)); // two ranks, five sleepers each, more
  kill(launcher.pid, SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_TRUE(launcher.await(0, 0));
}

TEST(Launch, ReturnsTheCodeOfAProgramThatTrapsInterrupts) {
  Launcher launcher("trap 'exit 7' INT; while :; do sleep 0.05; done; # trap");
  EXPECT_TRUE(launcher.await(3, 100)); // both run, and one at least sleeps
  std::this_thread::sleep_for(std::chrono::milliseconds(300)); // past `trap`
  kill(launcher.pid, SIGINT);
  EXPECT_EQ(launcher.wait(), 7);
  EXPECT_TRUE(launcher.await(0, 0));
}

TEST(Launch, GivesTheOthersTimeToEndAfterAnInterrupt) {
  const Outcome outcome = launch_shell(
      2,
      "trap 'sleep 0.3; echo saved $RANK; exit 7' INT; if [ $RANK = 0 ]; then "
      "trap 'exit 7' INT; sleep 0.3; kill -INT $PPID; fi; while :; do sleep "
      "0.05; done");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(outcome.out, HasSubstr("[1] saved 1"));
}

} // namespace
} // namespace tessera
