// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <tessera/comm/launch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
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
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = launch(options);
  std::string out = testing::internal::GetCapturedStdout();
  return {code, std::move(out), testing::internal::GetCapturedStderr()};
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

} // namespace tessera
