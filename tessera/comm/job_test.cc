// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/job.h>
#include <tessera/comm/plugin.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/store.h>
#include <tessera/comm/world.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using testing::HasSubstr;

// The environment of a rank, as its launcher would make it.
class Variables : public testing::Test {
 protected:
  void SetUp() override {
    TearDown();
  }
  void TearDown() override {
    for (const char* name :
         {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "MASTER_ADDR",
          "MASTER_PORT",
          "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE",
          "OMPI_COMM_WORLD_LOCAL_RANK",
          "PMI_RANK",
          "PMI_SIZE",
          "MPI_LOCALRANKID",
          "MPI_LOCALNRANKS",
          "SLURM_PROCID",
          "SLURM_NTASKS",
          "SLURM_LOCALID",
          "SLURM_JOB_ID",
          "SLURM_STEP_ID",
          "SLURM_STEP_NUM_TASKS",
          "SLURM_STEP_NODELIST",
          "SLURM_NODELIST",
          "TESSERA_BACKEND",
          "TESSERA_MPI_PLUGIN"}) {
      unsetenv(name);
    }
  }
  static void set(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  static void expect_refused(
      const std::function<void()>& call, const std::string& text) {
    EXPECT_THAT(call, testing::ThrowsMessage<UsageError>(HasSubstr(text)));
  }
};

TEST_F(Variables, NoneIsNoJob) {
  EXPECT_FALSE(find_job());
  set({{"SLURM_NTASKS", "4"}}); // an interactive allocation, not a task
  EXPECT_FALSE(find_job());
}

TEST_F(Variables, EachLauncherIsRecognised) {
  const auto expect = [](JobLauncher launcher, const std::string& found) {
    const auto job = find_job();
    ASSERT_TRUE(job);
    EXPECT_EQ(job->launcher, launcher);
    EXPECT_EQ(job->rank, 2);
    EXPECT_EQ(job->size, 4);
    EXPECT_EQ(job->local_rank, 1);
    EXPECT_EQ(job->found, found);
  };
  set(
      {{"SLURM_PROCID", "2"},
       {"SLURM_NTASKS", "8"},
       {"SLURM_STEP_NUM_TASKS", "4"}, // the step's size, not the allocation's
       {"SLURM_LOCALID", "1"}});
  expect(JobLauncher::kSlurm, "SLURM_STEP_NUM_TASKS=4");
  set({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}); // srun --mpi=pmi2
  expect(JobLauncher::kHydra, "PMI_SIZE=4");
  set(
      {{"OMPI_COMM_WORLD_RANK", "2"},
       {"OMPI_COMM_WORLD_SIZE", "4"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  expect(JobLauncher::kOpenMpi, "OMPI_COMM_WORLD_SIZE=4");
  set({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}});
  expect(JobLauncher::kTorchrun, "WORLD_SIZE=4");
}

TEST_F(Variables, ThoseThatMakeNoSenseAreRefused) {
  set({{"PMI_RANK", "4"}, {"PMI_SIZE", "4"}});
  expect_refused(find_job, "PMI_RANK=4, expected 0 to 3");
  set({{"OMPI_COMM_WORLD_SIZE", "4"}});
  expect_refused(find_job, "OMPI_COMM_WORLD_RANK is not set");
}

TEST_F(Variables, ABatchScriptIsNoTask) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  expect_refused(find_job, "srun did not start this process");
  set({{"SLURM_NTASKS", "1"}});
  EXPECT_EQ(find_job()->size, 1);
}

TEST_F(Variables, FirstHostOfSlurmsLists) {
  for (const auto& [list, host] : std::map<std::string, std::string>{
           {"login", "login"},
           {"a1,b2", "a1"},
           {"gpu[07-09,12],login", "gpu07"},
           {"n[3,1-2]", "n3"},
           {"rack[1-2]node[03-04].site", "rack1node03.site"}}) {
    EXPECT_EQ(first_slurm_host(list), host);
  }
  for (const char* list : {"", ",a", "gpu[1-2", "a]"}) {
    expect_refused([list] { first_slurm_host(list); }, "set MASTER_ADDR");
  }
}

TEST_F(Variables, SlurmJobsMeetAtPortsOfTheirOwn) {
  expect_refused(slurm_rendezvous, "set MASTER_ADDR");
  set(
      {{"SLURM_NODELIST", "gpu[1-2]"},
       {"SLURM_JOB_ID", "1001"},
       {"SLURM_STEP_ID", "0"}});
  const auto first = slurm_rendezvous();
  EXPECT_EQ(first.first, "gpu1");
  EXPECT_GE(first.second, 15'000);
  EXPECT_LT(first.second, 30'000);
  EXPECT_EQ(slurm_rendezvous(), first);
  set({{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(slurm_rendezvous().second, first.second);
  set({{"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "1002"}});
  EXPECT_NE(slurm_rendezvous().second, first.second);
  set({{"MASTER_ADDR", "login"}, {"MASTER_PORT", "1234"}});
  EXPECT_EQ(
      slurm_rendezvous(), (std::pair<std::string, uint16_t>("login", 1234)));
}

TEST_F(Variables, AMissingPluginSaysHowToGetIt) {
  set(
      {{"OMPI_COMM_WORLD_RANK", "0"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"TESSERA_MPI_PLUGIN", "nonesuch"}});
  expect_refused([] { init(); }, "libtessera_mpi_nonesuch.so is not there");
  set({{"TESSERA_MPI_PLUGIN", "/nowhere/plugin.so"}});
  expect_refused([] { init(); }, "cannot be loaded");
}

TEST_F(Variables, MpiNeedsAWorldFoundThroughMpi) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TESSERA_BACKEND", "pigeon"}});
  expect_refused([] { init(); }, "expected one of shm, gloo, mpi");
}

TEST(Plugin, AnotherLibraryIsNoPlugin) {
  EXPECT_THAT(
      [] { load_plugin("libm.so.6", "tessera_mpi_plugin"); },
      testing::ThrowsMessage<UsageError>(HasSubstr("has no function")));
}

// The addresses on which this process listens, as the kernel's table has them.
std::vector<std::string> listeners_at(uint16_t port) {
  std::vector<std::string> found;
  std::array<char, 8> wanted{};
  std::snprintf(wanted.data(), wanted.size(), ":%04X", port);
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      words >> number >> local >> remote >> state;
      if (state == "0A" && local.ends_with(wanted.data())) {
        found.push_back(local.substr(0, local.find(':')));
      }
    }
  }
  return found;
}

TEST(Store, ListensOnLoopbackAlone) {
  StoreAddress address{"127.0.0.1"};
  const auto served = serve_store(address, std::chrono::seconds(10));
  EXPECT_THAT(listeners_at(address.port), testing::ElementsAre("0100007F"));
  const auto joined = join_store(address, std::chrono::seconds(10));
  served->set("key", std::string("value"));
  EXPECT_EQ(joined->get_to_str("key"), "value");
  StoreAddress same = address;
  EXPECT_THAT(
      [&same] { serve_store(same, std::chrono::seconds(10)); },
      testing::ThrowsMessage<IoError>(HasSubstr("is the port free?")));
}

TEST(Store, UnknownHostsAreNamed) {
  StoreAddress address{"no-such-host.invalid", 15'000};
  EXPECT_THAT(
      [&address] { serve_store(address, std::chrono::seconds(1)); },
      testing::ThrowsMessage<IoError>(HasSubstr("no-such-host.invalid")));
}

TEST_F(Variables, ATaskOfSrunMeetsTheOthersAtTheStepsFirstHost) {
  set(
      {{"SLURM_PROCID", "0"},
       {"SLURM_NTASKS", "1"},
       {"SLURM_STEP_ID", "3"},
       {"SLURM_JOB_ID", std::to_string(getpid())},
       {"SLURM_STEP_NODELIST", "localhost"}});
  EXPECT_EQ(init().size(), 1);
}

} // namespace
} // namespace tessera
