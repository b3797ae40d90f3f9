// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <tessera/comm/launch_signals.h>
#include <tessera/comm/launch_spawn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string_view>

namespace tessera {
namespace {

constexpr int kCannotRun = 127;

// A vector of C strings that borrows from `words`, ended by a null.
std::vector<char*> borrowed(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (const std::string& word : words) {
    pointers.push_back(const_cast<char*>(word.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

// In the child. Only calls that are safe after a fork. `report` takes the error
// of exec.
[[noreturn]] void become(
    pid_t parent,
    const Spawn& spawn,
    int report,
    char* const* arguments,
    char* const* entries) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) {
    _exit(kCannotRun); // it died before the line above
  }
  setpgid(0, 0);
  const int in =
      spawn.in >= 0 ? spawn.in : open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(in, STDIN_FILENO);
  dup2(spawn.out, STDOUT_FILENO);
  dup2(spawn.err, STDERR_FILENO);
  execvpe(arguments[0], arguments, entries);
  const int error = errno;
  const bool told = write(report, &error, sizeof(error)) > 0;
  _exit(told ? kCannotRun : kCannotRun + 1);
}

} // namespace

std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& ours) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto name = text.substr(0, text.find('='));
    if (std::ranges::none_of(
            ours, [&](const auto& our) { return our.first == name; })) {
      all.emplace_back(text);
    }
  }
  for (const auto& [name, value] : ours) {
    all.push_back(fmt::format("{}={}", name, value));
  }
  return all;
}

pid_t spawn(const Spawn& spawn, int& error) {
  const Pipe report; // stays empty when exec succeeds
  // All memory is allocated before the fork: other threads may hold locks.
  const std::vector<char*> entries = borrowed(spawn.environment);
  const std::vector<char*> arguments = borrowed(spawn.command);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    throw_launch_error("fork");
  }
  if (pid == 0) {
    become(parent, spawn, report.write, arguments.data(), entries.data());
  }
  setpgid(pid, pid); // as the child does; whoever comes first
  close(report.write);
  fcntl(report.read, F_SETFL, 0);
  error = 0;
  if (read(report.read, &error, sizeof(error)) != sizeof(error)) {
    error = 0;
  }
  close(report.read);
  return pid;
}

} // namespace tessera
