// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch_guard.h>
#include <tessera/comm/launch_output.h>
#include <tessera/comm/launch_signals.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

constexpr auto kLongestKill = std::chrono::seconds(5);
constexpr int kBetweenLooksMs = 5;

pid_t guarded_process = -1; // in the guard

// The parent of a process, by /proc/<pid>/stat; -1: it has gone.
pid_t parent_of(const char* pid) {
  const std::string path = fmt::format("/proc/{}/stat", pid);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return -1;
  }
  std::array<char, 512> text{};
  const ssize_t bytes = read(fd, text.data(), text.size() - 1);
  close(fd);
  const std::string_view line(
      text.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  const auto end = line.rfind(')'); // the name before it may hold anything
  if (end == std::string_view::npos || end + 4 > line.size()) {
    return -1;
  }
  return static_cast<pid_t>(std::strtol(line.data() + end + 4, nullptr, 10));
}

std::vector<pid_t> children() {
  std::vector<pid_t> found;
  DIR* folder = opendir("/proc");
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* entry = readdir(folder)) {
    const char* name = entry->d_name;
    if (name[0] >= '1' && name[0] <= '9' && parent_of(name) == getpid()) {
      found.push_back(static_cast<pid_t>(std::strtol(name, nullptr, 10)));
    }
  }
  closedir(folder);
  return found;
}

[[noreturn]] void be_guard(
    const std::function<int()>& job, pid_t parent, int errors) {
  guarded_process = parent;
  // SIGCHLD, since it is caught in any case: the job looks around on it.
  prctl(PR_SET_PDEATHSIG, SIGCHLD);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  setpgid(0, 0);
  int code = 1;
  try {
    code = job();
  } catch (const std::exception& error) {
    write_all(errors, error.what());
  }
  kill_descendants();
  _exit(code);
}

std::string read_all(int fd) {
  std::string text;
  std::array<char, 4096> buffer{};
  fcntl(fd, F_SETFL, 0);
  for (ssize_t bytes = 1; bytes > 0;) {
    bytes = read(fd, buffer.data(), buffer.size());
    text.append(
        buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  }
  return text;
}

// Passes signals on until the guard has ended; returns its status.
int wait_for(pid_t guard, int signals) {
  int status = 0;
  while (waitpid(guard, &status, WNOHANG) != guard) {
    pollfd polled{.fd = signals, .events = POLLIN, .revents = 0};
    poll(&polled, 1, -1);
    unsigned char number = 0;
    while (read(signals, &number, 1) == 1) {
      if (number != SIGCHLD) {
        kill(guard, number);
      }
    }
  }
  return status;
}

} // namespace

bool guarded_process_died() {
  return getppid() != guarded_process;
}

void kill_descendants() {
  const auto end = std::chrono::steady_clock::now() + kLongestKill;
  while (true) {
    for (const pid_t child : children()) {
      kill(child, SIGKILL);
    }
    pid_t reaped = 1;
    while (reaped > 0) { // each may leave us children of its own
      reaped = waitpid(-1, nullptr, WNOHANG);
    }
    if (reaped < 0 && errno == ECHILD) {
      return;
    }
    if (std::chrono::steady_clock::now() > end) {
      return; // one hangs in the kernel, or /proc does not show it
    }
    poll(nullptr, 0, kBetweenLooksMs);
  }
}

int run_guarded(const std::function<int()>& job) {
  const CaughtSignals signals; // from here on none is lost
  const Pipe errors;
  const pid_t parent = getpid();
  const pid_t guard = fork();
  if (guard < 0) {
    throw_launch_error("fork");
  }
  if (guard == 0) {
    close(errors.read);
    be_guard(job, parent, errors.write);
  }
  close(errors.write);
  const int status = wait_for(guard, signals.fd());
  const std::string text = read_all(errors.read);
  close(errors.read);
  if (!text.empty()) {
    throw IoError(text);
  }
  if (WIFSIGNALED(status)) {
    write_all(
        STDERR_FILENO,
        fmt::format(
            "tessera: the process that watches the ranks was ended by signal "
            "{} ({})\n",
            WTERMSIG(status),
            strsignal(WTERMSIG(status))));
    return 128 + WTERMSIG(status);
  }
  return WEXITSTATUS(status);
}

} // namespace tessera
