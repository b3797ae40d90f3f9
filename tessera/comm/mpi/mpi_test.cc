// SPDX-License-Identifier: Apache-2.0
// Starts mpi_ranks and mpi_owner_* under the launchers of the MPI libraries
// that the build has found, and by hand with the variables of srun.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

struct Library {
  const char* name;
  const char* launcher; // empty: not found
  const char* owner; // mpi_owner, linked with it
};

#include <mpi_programs.h> // kLibraries, kRanksProgram: where the build put them

struct Outcome {
  int code = -1;
  std::string output; // both streams
};

// The shell ends what has not ended after `seconds`, with code 124.
Outcome run(const std::string& command, int seconds = 240) {
  const std::string whole = "exec timeout -k 5 " + std::to_string(seconds) +
      " sh -c '" + command + "' 2>&1 < /dev/null";
  Outcome outcome;
  FILE* pipe = popen(whole.c_str(), "r");
  std::array<char, 4096> buffer{};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) {
    outcome.output += buffer.data();
  }
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return outcome;
}

int times(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

class UnderLauncher : public testing::TestWithParam<Library> {
 protected:
  void SetUp() override {
    if (*GetParam().launcher == '\0') {
      GTEST_SKIP() << "no launcher of " << GetParam().name
                   << " on this machine";
    }
  }

  static Outcome start(
      int ranks,
      const std::string& program,
      const std::string& variables = {},
      const Library& launcher = GetParam(),
      int seconds = 240) {
    const bool open_mpi = std::string(launcher.name) == "openmpi";
    const std::string options =
        open_mpi ? " --oversubscribe --allow-run-as-root" : "";
    return run(
        "env " + variables + " " + launcher.launcher + options + " -n " +
            std::to_string(ranks) + " " + program,
        seconds);
  }
};

std::string ranks_program(const std::string& part) {
  return kRanksProgram + " " + part;
}

std::string name_of_library(const testing::TestParamInfo<Library>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(
    Mpi, UnderLauncher, testing::ValuesIn(kLibraries), name_of_library);

TEST_P(UnderLauncher, EveryCollectiveHoldsOnOneToFiveRanks) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    const Outcome outcome = start(ranks, ranks_program("conformance"));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_EQ(
        times(outcome.output, ranks == 1 ? "over single" : "over mpi"), ranks)
        << outcome.output;
    EXPECT_THAT(outcome.output, Not(HasSubstr("leaked")));
  }
}

TEST_P(UnderLauncher, EveryCollectiveHoldsInTheDebugMode) {
  const Outcome outcome =
      start(3, ranks_program("conformance"), "TESSERA_DEBUG_COLLECTIVES=1");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(times(outcome.output, "all held"), 3) << outcome.output;
}

TEST_P(UnderLauncher, LargeCountsAreCutIntoPieces) {
  for (const int ranks : {2, 3}) {
    const Outcome outcome = start(
        ranks, ranks_program("conformance"), "TESSERA_MPI_MAX_COUNT=5000");
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_EQ(times(outcome.output, "all held"), ranks) << outcome.output;
  }
}

TEST_P(UnderLauncher, InitFindsTheWorldAndTakesSharedMemory) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Outcome outcome = start(ranks, ranks_program("smoke"));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_THAT(
          outcome.output,
          HasSubstr(
              "rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
              ", local " + std::to_string(rank) + ": reduced over " +
              (ranks == 1 ? "single" : "shm")));
    }
  }
}

TEST_P(UnderLauncher, TheVariableChoosesTheBackend) {
  for (const char* backend : {"mpi", "gloo"}) {
    const Outcome outcome = start(
        2, ranks_program("smoke"), std::string("TESSERA_BACKEND=") + backend);
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_EQ(times(outcome.output, std::string("over ") + backend), 2)
        << outcome.output;
  }
}

TEST_P(UnderLauncher, WorldsFollowEachOther) {
  const Outcome outcome = start(3, ranks_program("twice"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(times(outcome.output, "third world"), 3) << outcome.output;
}

TEST_P(UnderLauncher, AMessageOfTheWrongSizeKillsTheGroup) {
  const Outcome outcome = start(2, ranks_program("careless"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      AllOf(
          HasSubstr(
              "from rank 0, tag 0: got messages of 12 bytes, expected 20"),
          HasSubstr("the group is dead; first error: recv")));
}

TEST_P(UnderLauncher, ALatePeerIsATimeout) {
  const Outcome outcome = start(3, ranks_program("stall"));
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE(outcome.code, 124) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      ContainsRegex("all_reduce .rank [02]/3, group world, seq 2.: rank 1 .pid "
                    "[0-9]+, host .*., last operation all_reduce seq 1, did "
                    "not arrive in time .timeout of 2000 ms; mpi: timed out"));
}

// The file's text once it has that many lines, or after a while.
std::string lines_of(const std::string& path, int lines) {
  std::string text;
  for (int look = 0; look < 300 && times(text, "\n") < lines; ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::ifstream file(path);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  return text;
}

// Launchers end the others before they can say anything: a shell keeps the
// death from Open MPI's, and Hydra is asked not to, and then only sends
// SIGUSR1, but forwards no output. UCX without CMA, which ends a process whose
// peer is gone.
TEST_P(UnderLauncher, KillNineIsAnErrorThatNamesTheRank) {
  const bool hydra = std::string(GetParam().name) == "mpich";
  const std::string path = testing::TempDir() + "/tessera_mpi_killed." +
      GetParam().name + std::to_string(getpid());
  for (const std::string where : {"inside", "between"}) {
    SCOPED_TRACE(where);
    const Outcome outcome = start(
        3,
        (hydra ? "-disable-auto-cleanup " : "") +
            ("sh -c \"trap : USR1; " + ranks_program("killed") + " >>" + path) +
            "; true\"",
        "UCX_TLS=^cma TESSERA_TEST_WHERE=" + where,
        GetParam(),
        60);
    EXPECT_NE(outcome.code, 124) << outcome.output;
    const std::string text = lines_of(path, 2);
    for (const char* rank : {"0", "2"}) {
      EXPECT_THAT(
          text,
          ContainsRegex(
              std::string("caught: all_reduce .rank ") + rank +
              "/3, group world, seq [0-9]+.: .*rank 1 .pid [0-9]+, host .*., "
              "last operation all_reduce seq [0-9]+, died"));
    }
    std::remove(path.c_str());
  }
}

// Whatever ends one rank ends the job, though the others wait for ever: only
// the launcher's end can close the pipe before the limit.
TEST_P(UnderLauncher, OneRanksEndIsTheJobsEnd) {
  for (const char* how : {"throw", "kill", "exit0", "exit3", "_exit0"}) {
    for (const char* backend : {"mpi", "shm"}) {
      SCOPED_TRACE(std::string(how) + " over " + backend);
      const Outcome outcome = start(
          3,
          ranks_program(how),
          std::string("TESSERA_BACKEND=") + backend,
          GetParam(),
          60);
      EXPECT_NE(outcome.code, 124) << outcome.output;
      // Hydra says nothing of a rank that leaves with 0 and without a word.
      if (std::string(how) != "_exit0") {
        EXPECT_NE(outcome.code, 0) << outcome.output;
      }
    }
  }
}

TEST_P(UnderLauncher, TheLibraryOfAnotherLauncherIsRefused) {
  for (const Library& other : kLibraries) {
    if (std::string(other.name) == GetParam().name || *other.launcher == '\0') {
      continue;
    }
    for (const std::string& program :
         {ranks_program("smoke"), std::string(GetParam().owner)}) {
      const Outcome outcome = start(
          2,
          program,
          std::string("TESSERA_MPI_PLUGIN=") + GetParam().name,
          other,
          60);
      EXPECT_NE(outcome.code, 0) << outcome.output;
      EXPECT_NE(outcome.code, 124) << outcome.output;
      EXPECT_THAT(
          outcome.output,
          AllOf(
              HasSubstr("_SIZE=2, but MPI_COMM_WORLD has 1 here"),
              HasSubstr("start it by the mpirun or mpiexec of that library")));
    }
  }
}

TEST_P(UnderLauncher, VariablesThatSayLessThanMpiAreRefused) {
  const Outcome outcome = start(
      2,
      "env -u OMPI_COMM_WORLD_SIZE -u OMPI_COMM_WORLD_RANK SLURM_PROCID=0 "
      "SLURM_NTASKS=1 SLURM_STEP_ID=0 RANK=0 WORLD_SIZE=1 "
      "MASTER_ADDR=localhost "
      "MASTER_PORT=1 " +
          std::string(GetParam().owner) + " handed_over",
      {},
      GetParam(),
      60);
  EXPECT_NE(outcome.code, 0) << outcome.output;
  EXPECT_NE(outcome.code, 124) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("torchrun set WORLD_SIZE=1, but MPI_COMM_WORLD has 2 here"));
}

TEST_P(UnderLauncher, AProgramThatInitialisedMpiKeepsIt) {
  for (const int ranks : {1, 2, 3}) {
    const Outcome outcome =
        start(ranks, std::string(GetParam().owner) + " initialised");
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_EQ(
        times(outcome.output, ranks == 1 ? "over single" : "over mpi"), ranks)
        << outcome.output;
    if (ranks > 1) {
      EXPECT_EQ(times(outcome.output, "refused: mpi: a collective"), ranks)
          << outcome.output;
    }
  }
}

TEST_P(UnderLauncher, ACommunicatorIsHandedOver) {
  const Outcome outcome =
      start(5, std::string(GetParam().owner) + " handed_over");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (const char* line :
       {"rank 2 of 3 over mpi",
        "rank 1 of 2 over mpi",
        "rank 2 of 3 over shm",
        "rank 1 of 2 over shm"}) {
    EXPECT_EQ(times(outcome.output, line), 1) << outcome.output;
  }
}

TEST_P(UnderLauncher, AWorldMayOutliveMpi) {
  const Outcome outcome =
      start(2, std::string(GetParam().owner) + " finalised_first");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(times(outcome.output, "over mpi"), 2) << outcome.output;
}

TEST_P(UnderLauncher, TheNullCommunicatorIsRefused) {
  const Outcome outcome =
      start(2, std::string(GetParam().owner) + " nobody_hands_over");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_EQ(times(outcome.output, "is MPI_COMM_NULL"), 2) << outcome.output;
}

// What srun would start, without it: the ranks find each other by the node list
// and the numbers of job and step.
std::string tasks_of_srun(int ranks, const std::string& program) {
  std::string script;
  for (int rank = 0; rank < ranks; ++rank) {
    script += "env SLURM_JOB_ID=" + std::to_string(getpid()) +
        " SLURM_STEP_ID=2 SLURM_STEP_NODELIST=localhost SLURM_PROCID=" +
        std::to_string(rank) + " SLURM_LOCALID=" + std::to_string(rank) +
        " SLURM_NTASKS=" + std::to_string(ranks) + " " + program + " & ";
  }
  return script + "wait";
}

TEST(Srun, TasksFindEachOtherWithoutMpi) {
  const Outcome outcome = run(tasks_of_srun(3, ranks_program("smoke")), 60);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string place = std::to_string(rank);
    EXPECT_THAT(
        outcome.output,
        HasSubstr(
            "rank " + place + " of 3, local " + place + ": reduced over shm"));
  }
}

TEST(Srun, MpiWithoutSlurmsSupportIsRefused) {
  const Outcome outcome =
      run(tasks_of_srun(2, "env TESSERA_BACKEND=mpi " + ranks_program("smoke")),
          60);
  EXPECT_NE(outcome.code, 124) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("srun set SLURM_NTASKS=2, but MPI_COMM_WORLD has 1 here"));
}

TEST(Torchrun, MpiIsRefused) {
  const Outcome outcome =
      run("env RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=15001 "
          "TESSERA_BACKEND=mpi " +
              ranks_program("smoke"),
          60);
  EXPECT_NE(outcome.code, 124) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      HasSubstr("torchrun set WORLD_SIZE=2, but MPI_COMM_WORLD has 1 here"));
}

} // namespace
