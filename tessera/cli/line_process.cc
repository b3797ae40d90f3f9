// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tessera/base/error.h>
#include <tessera/cli/line_process.h>
#include <tessera/comm/launch_signals.h>
#include <tessera/comm/launch_spawn.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace tessera::cli {

LineProcess::LineProcess(
    std::string name,
    const std::vector<std::string>& command,
    const std::vector<std::string>& environment)
    : name_(std::move(name)) {
  std::array<int, 2> input{}; // a socket, so that writing raises no SIGPIPE
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, input.data()) != 0) {
    throw IoError(fmt::format("{}: socketpair: {}", name_, strerror(errno)));
  }
  const Pipe output;
  int error = 0;
  pid_ = spawn(
      {.command = command,
       .environment = environment,
       .out = output.write,
       .err = STDERR_FILENO,
       .in = input[1]},
      error);
  close(input[1]);
  close(output.write);
  in_ = input[0];
  out_ = output.read;
  if (error != 0) {
    reap();
    throw IoError(fmt::format(
        "{}: '{}' cannot be run: {}", name_, command.front(), strerror(error)));
  }
}

LineProcess::~LineProcess() {
  close_input();
  close(out_);
  if (pid_ > 0) {
    kill(-pid_, SIGKILL);
    reap();
  }
}

void LineProcess::write_line(const std::string& line) {
  const std::string text = line + '\n';
  const ssize_t sent = send(in_, text.data(), text.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(text.size())) {
    throw_ended();
  }
}

std::string LineProcess::read_line() {
  while (true) {
    const auto end = received_.find('\n');
    if (end == std::string::npos) {
      if (!receive(-1)) {
        throw_ended();
      }
      continue;
    }
    std::string line = received_.substr(0, end);
    received_.erase(0, end + 1);
    if (line.starts_with('{')) {
      return line;
    }
  }
}

void LineProcess::close_input() {
  if (in_ >= 0) {
    close(in_);
    in_ = -1;
  }
}

void LineProcess::await_end(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  bool open = true;
  while (open) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    open = left.count() > 0 && receive(static_cast<int>(left.count()));
  }
}

bool LineProcess::receive(int limit_ms) {
  pollfd ready{.fd = out_, .events = POLLIN, .revents = 0};
  int count = 0;
  do {
    count = poll(&ready, 1, limit_ms);
  } while (count < 0 && errno == EINTR);
  if (count <= 0) {
    return false;
  }
  std::array<char, 4096> buffer{};
  const ssize_t bytes = read(out_, buffer.data(), buffer.size());
  if (bytes <= 0) {
    return false;
  }
  received_.append(buffer.data(), static_cast<size_t>(bytes));
  return true;
}

void LineProcess::throw_ended() {
  if (pid_ < 0) {
    throw IoError(fmt::format("{} has ended before", name_));
  }
  kill(-pid_, SIGKILL); // one that only closed its output
  const int status = reap();
  throw IoError(fmt::format(
      "{} ended with {} {} before it answered; its errors are above, if it "
      "wrote any",
      name_,
      WIFSIGNALED(status) ? "signal" : "code",
      WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status)));
}

int LineProcess::reap() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return status;
}

} // namespace tessera::cli
