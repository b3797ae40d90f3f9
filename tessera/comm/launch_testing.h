// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tessera/comm/launch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

// For tests that launch processes: what came of it.
struct Outcome {
  int code;
  std::string out;
  std::string err;
};

inline Outcome launch_and_capture(const LaunchOptions& options) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int code = launch(options);
  std::string out = ::testing::internal::GetCapturedStdout();
  return {code, std::move(out), ::testing::internal::GetCapturedStderr()};
}

inline Outcome launch_shell(
    int64_t ranks, const std::string& script, int64_t restarts = 0) {
  return launch_and_capture(
      {.command = {"sh", "-c", script},
       .ranks = ranks,
       .grace = std::chrono::seconds(1),
       .restarts = restarts});
}

inline std::string this_program() {
  std::array<char, 4096> path{};
  const auto length = readlink("/proc/self/exe", path.data(), path.size() - 1);
  return {path.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

// Ranks that are this test program again, each running one of its disabled
// tests.
inline Outcome launch_body(
    int64_t ranks,
    const std::string& body,
    std::vector<std::pair<std::string, std::string>> variables = {}) {
  return launch_and_capture(
      {.command =
           {this_program(),
            "--gtest_also_run_disabled_tests",
            "--gtest_filter=RankBody.DISABLED_" + body},
       .ranks = ranks,
       .environment = std::move(variables)});
}

// Starts the ranks without a launcher that would stop the others first: each
// must notice by itself.
struct Unlaunched {
  explicit Unlaunched(
      int64_t ranks, const std::string& body, const std::string& backend) {
    const std::string port = std::to_string(20'000 + getpid() % 20'000);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      outputs.push_back(
          ::testing::TempDir() + "tessera_" + std::to_string(getpid()) + "_" +
          std::to_string(rank));
      const pid_t pid = fork();
      if (pid == 0) {
        setenv("RANK", std::to_string(rank).c_str(), 1);
        setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("MASTER_PORT", port.c_str(), 1);
        setenv("TESSERA_BACKEND", backend.c_str(), 1);
        if (freopen(outputs.back().c_str(), "w", stdout) == nullptr) {
          std::_Exit(9);
        }
        const std::string filter = "--gtest_filter=RankBody.DISABLED_" + body;
        execl(
            this_program().c_str(),
            "rank",
            "--gtest_also_run_disabled_tests",
            filter.c_str(),
            nullptr);
        std::_Exit(9);
      }
      pids.push_back(pid);
    }
  }

  int wait(std::size_t rank) const {
    int status = 0;
    waitpid(pids[rank], &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  std::string output(std::size_t rank) const {
    std::ifstream file(outputs[rank]);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::vector<pid_t> pids;
  std::vector<std::string> outputs;
};

} // namespace tessera
