// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/launch.h>
#include <tessera/comm/launch_output.h>
#include <tessera/comm/launch_signals.h>
#include <tessera/comm/rank_status.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(250); // between two looks
constexpr auto kStuck = std::chrono::seconds(3); // a wait for a rank that left
constexpr int kCannotRun = 127;

uint16_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || bind(fd, generic, length) != 0 ||
      getsockname(fd, generic, &length) != 0) {
    throw_launch_error("cannot find a free port");
  }
  close(fd);
  return ntohs(address.sin_port);
}

int64_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

struct Stream {
  int fd = -1;
  std::optional<LineForwarder> forwarder;
  std::optional<TailKeeper> keeper; // neither: dropped

  void add(std::string_view text) {
    if (forwarder) {
      forwarder->add(text);
    } else if (keeper) {
      keeper->add(text);
    }
  }
};

// File descriptors of a rank that is about to run.
struct Streams {
  int out;
  int err;
  int report; // takes the error of exec
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
  std::array<Stream, 2> streams; // standard output, standard error
  uint32_t seen_calls = 0;
  Clock::time_point seen_since;
};

class Job {
 public:
  explicit Job(const LaunchOptions& options)
      : options_(options),
        ranks_(static_cast<std::size_t>(options.ranks)),
        port_(free_port()) {
    statuses_ = make_rank_statuses(options.ranks, status_path_);
  }
  ~Job() {
    kill_all(SIGKILL);
    for (Rank& rank : ranks_) {
      for (Stream& stream : rank.streams) {
        close_stream(stream);
      }
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    for (std::size_t rank = 0; rank < ranks_.size() && code_ == 0; ++rank) {
      start(rank);
    }
    while (any_running()) {
      wait_for_news();
      read_signals();
      reap();
      look_for_abandoned();
      kill_if_late();
    }
    drain();
    return code_;
  }

 private:
  std::vector<std::string> variables(std::size_t rank) const;
  void start(std::size_t rank);
  [[noreturn]] static void become(
      pid_t launcher,
      const Streams& streams,
      char* const* arguments,
      char* const* entries);
  void route(std::size_t rank, const Pipe& out, const Pipe& err);
  void wait_for_news();
  void read_stream(Stream& stream);
  static void close_stream(Stream& stream);
  void read_signals();
  void reap();
  void ended(std::size_t rank, int status);
  void fail(int code, const std::string& text);
  void stop();
  void look_for_abandoned();
  void kill_if_late();
  void drain();
  void kill_all(int signal) const;
  bool any_running() const {
    return std::ranges::any_of(
        ranks_, [](const Rank& rank) { return rank.running; });
  }
  bool raw(std::size_t rank) const {
    return options_.output == LaunchOutput::kRankZeroOnly && rank == 0;
  }

  const LaunchOptions& options_;
  CaughtSignals signals_;
  std::vector<Rank> ranks_;
  uint16_t port_;
  std::string status_path_;
  std::shared_ptr<RankStatus[]> statuses_;
  int code_ = 0;
  int signals_passed_ = 0;
  std::optional<Clock::time_point> kill_at_;
  std::optional<std::size_t> deserter_; // ended well, but not in order
};

std::vector<std::string> Job::variables(std::size_t rank) const {
  const auto size = static_cast<int64_t>(ranks_.size());
  std::vector<std::pair<std::string, std::string>> ours = {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(size)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(size)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port_)},
      {kRankStatusVariable, status_path_}};
  if (!environment("OMP_NUM_THREADS")) {
    const int64_t share = std::max<int64_t>(1, allowed_cores() / size);
    ours.emplace_back("OMP_NUM_THREADS", std::to_string(share));
  }
  ours.insert(
      ours.end(), options_.environment.begin(), options_.environment.end());
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

void Job::start(std::size_t rank) {
  const Pipe out;
  const Pipe err;
  const Pipe report; // stays empty when exec succeeds
  // All memory is allocated before the fork: other threads may hold locks.
  const std::vector<std::string> own = variables(rank);
  const std::vector<char*> entries = borrowed(own);
  const std::vector<char*> arguments = borrowed(options_.command);
  const Streams streams{
      .out = raw(rank) ? STDOUT_FILENO : out.write,
      .err = raw(rank) ? STDERR_FILENO : err.write,
      .report = report.write};
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    throw_launch_error("fork");
  }
  if (pid == 0) {
    become(launcher, streams, arguments.data(), entries.data());
  }
  setpgid(pid, pid); // as the child does; whoever comes first
  ranks_[rank].pid = pid;
  ranks_[rank].running = true;
  for (const int end : {out.write, err.write, report.write}) {
    close(end);
  }
  route(rank, out, err);
  fcntl(report.read, F_SETFL, 0);
  int error = 0;
  if (read(report.read, &error, sizeof(error)) == sizeof(error)) {
    fail(
        kCannotRun,
        fmt::format(
            "cannot run '{}': {}", options_.command[0], std::strerror(error)));
  }
  close(report.read);
}

// In the child. Only calls that are safe after a fork.
void Job::become(
    pid_t launcher,
    const Streams& streams,
    char* const* arguments,
    char* const* entries) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) {
    _exit(kCannotRun); // it died before the line above
  }
  setpgid(0, 0);
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  dup2(streams.out, STDOUT_FILENO);
  dup2(streams.err, STDERR_FILENO);
  execvpe(arguments[0], arguments, entries);
  const int error = errno;
  const bool told = write(streams.report, &error, sizeof(error)) > 0;
  _exit(told ? kCannotRun : kCannotRun + 1);
}

void Job::route(std::size_t rank, const Pipe& out, const Pipe& err) {
  auto& [output, errors] = ranks_[rank].streams;
  output.fd = out.read;
  errors.fd = err.read;
  if (options_.output == LaunchOutput::kPrefixed) {
    const std::string prefix = fmt::format("[{}] ", rank);
    output.forwarder.emplace(STDOUT_FILENO, prefix);
    errors.forwarder.emplace(STDERR_FILENO, prefix);
  } else {
    errors.keeper.emplace();
  }
}

void Job::wait_for_news() {
  std::vector<pollfd> polled{
      {.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
  std::vector<Stream*> streams{nullptr};
  for (Rank& rank : ranks_) {
    for (Stream& stream : rank.streams) {
      if (stream.fd >= 0) {
        polled.push_back({.fd = stream.fd, .events = POLLIN, .revents = 0});
        streams.push_back(&stream);
      }
    }
  }
  poll(polled.data(), polled.size(), static_cast<int>(kTick.count()));
  for (std::size_t i = 1; i < polled.size(); ++i) {
    if (polled[i].revents != 0) {
      read_stream(*streams[i]);
    }
  }
}

void Job::read_stream(Stream& stream) {
  std::array<char, 16384> buffer;
  const ssize_t bytes = read(stream.fd, buffer.data(), buffer.size());
  if (bytes > 0) {
    stream.add({buffer.data(), static_cast<std::size_t>(bytes)});
  } else if (bytes == 0 || errno != EAGAIN) {
    close_stream(stream);
  }
}

void Job::close_stream(Stream& stream) {
  if (stream.fd < 0) {
    return;
  }
  close(stream.fd);
  stream.fd = -1;
  if (stream.forwarder) {
    stream.forwarder->finish();
  }
}

void Job::read_signals() {
  unsigned char number = 0;
  while (read(signals_.fd(), &number, 1) == 1) {
    const int signal = number;
    if (signal == SIGCHLD) {
      continue;
    }
    kill_all(signal);
    if (++signals_passed_ > 1 && !kill_at_) {
      code_ = code_ == 0 ? 128 + signal : code_;
      stop();
    }
  }
}

void Job::reap() {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    int status = 0;
    if (ranks_[rank].running &&
        waitpid(ranks_[rank].pid, &status, WNOHANG) == ranks_[rank].pid) {
      ended(rank, status);
    }
  }
}

void Job::ended(std::size_t rank, int status) {
  ranks_[rank].running = false;
  kill(-ranks_[rank].pid, SIGKILL); // what it left behind
  const bool by_signal = WIFSIGNALED(status);
  const int code = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code == 0) {
    const auto phase = statuses_.get()[rank].phase.load();
    if (phase == RankPhase::kJoined && !deserter_) {
      deserter_ = rank;
    }
    return;
  }
  for (Stream& stream : ranks_[rank].streams) {
    while (stream.fd >= 0 && !kill_at_ && stream.keeper) {
      const auto before = stream.keeper->tail().size();
      read_stream(stream);
      if (stream.fd >= 0 && stream.keeper->tail().size() == before) {
        break;
      }
    }
  }
  const std::string how = by_signal ? fmt::format(
                                          "was ended by signal {} ({})",
                                          WTERMSIG(status),
                                          strsignal(WTERMSIG(status)))
                                    : fmt::format("ended with code {}", code);
  const auto& keeper = ranks_[rank].streams[1].keeper;
  if (!kill_at_ && keeper && !raw(rank)) {
    write_all(STDERR_FILENO, keeper->tail());
  }
  fail(code, fmt::format("rank {} (pid {}) {}", rank, ranks_[rank].pid, how));
}

// The first failure decides the launcher's code and stops the others.
void Job::fail(int code, const std::string& text) {
  if (kill_at_) {
    return;
  }
  const bool asked = signals_passed_ > 0; // ranks that end by it are no news
  if (!asked || code == kCannotRun) {
    write_all(
        STDERR_FILENO, fmt::format("tessera: {}; stopping the job\n", text));
  }
  code_ = code_ == 0 ? code : code_;
  stop();
}

void Job::stop() {
  kill_all(SIGTERM);
  kill_at_ = Clock::now() + options_.grace;
}

// A rank that ended with 0 but never left its world: wrong once another waits
// in one and the same collective for long.
void Job::look_for_abandoned() {
  if (!deserter_ || kill_at_) {
    return;
  }
  const auto now = Clock::now();
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& state = ranks_[rank];
    const RankStatus& status = statuses_.get()[rank];
    const uint32_t calls = status.calls.load();
    const bool waits = state.running && status.waiting.load() > 0;
    if (!waits || calls != state.seen_calls) {
      state.seen_calls = calls;
      state.seen_since = now;
    } else if (now - state.seen_since > kStuck) {
      fail(
          1,
          fmt::format(
              "rank {} (pid {}) ended with code 0 without leaving its world, "
              "and rank {} waits in a collective",
              *deserter_,
              ranks_[*deserter_].pid,
              rank));
      return;
    }
  }
}

void Job::kill_if_late() {
  if (kill_at_ && Clock::now() >= *kill_at_) {
    kill_all(SIGKILL);
  }
}

// What the ranks wrote before they ended.
void Job::drain() {
  for (Rank& rank : ranks_) {
    for (Stream& stream : rank.streams) {
      pollfd query{.fd = stream.fd, .events = POLLIN, .revents = 0};
      while (stream.fd >= 0 && poll(&query, 1, 0) > 0) {
        read_stream(stream);
      }
      close_stream(stream);
    }
  }
}

void Job::kill_all(int signal) const {
  for (const Rank& rank : ranks_) {
    if (rank.running) {
      kill(-rank.pid, signal);
    }
  }
}

} // namespace

int launch(const LaunchOptions& options) {
  if (options.ranks < 1 || options.command.empty()) {
    throw UsageError(fmt::format(
        "launch: got {} ranks of a command of {} words, expected at least one "
        "of each",
        options.ranks,
        options.command.size()));
  }
  return Job(options).run();
}

} // namespace tessera
