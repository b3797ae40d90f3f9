// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <tessera/base/environment.h>
#include <tessera/comm/launch_guard.h>
#include <tessera/comm/launch_job.h>
#include <tessera/comm/launch_output.h>
#include <tessera/comm/launch_spawn.h>
#include <tessera/comm/process_state.h>
#include <tessera/comm/rank_status.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(250); // between two looks
constexpr auto kStuck = std::chrono::seconds(3); // a wait for a rank that left
constexpr int kCannotRun = 127;
constexpr std::size_t kLastLines = 20;

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

struct Stream {
  int fd = -1;
  std::optional<LineForwarder> forwarder; // none: not shown
  TailKeeper* keeper = nullptr; // of the rank; null: nothing is kept

  void add(std::string_view text) {
    if (forwarder) {
      forwarder->add(text);
    }
    if (keeper != nullptr) {
      keeper->add(text);
    }
  }
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
  std::array<Stream, 2> streams; // standard output, standard error
  TailKeeper tail; // of what can be shown when it fails
  uint32_t seen_calls = 0;
  Clock::time_point seen_since;
};

class Job {
 public:
  Job(const LaunchOptions& options, const CaughtSignals& signals, int64_t count)
      : options_(options),
        signals_(signals),
        count_(count),
        ranks_(static_cast<std::size_t>(options.ranks)),
        port_(free_port()),
        started_(Clock::now()) {
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

  JobEnd run() {
    for (std::size_t rank = 0; rank < ranks_.size() && code_ == 0; ++rank) {
      start(rank);
    }
    while (any_running() && !guarded_process_died()) {
      wait_for_news();
      read_signals();
      reap();
      look_for_abandoned();
      kill_if_late();
    }
    drain();
    tell_first_failure();
    return {
        .code = code_,
        .failed = code_ != 0 && code_ != kCannotRun && signals_passed_ == 0 &&
            !guarded_process_died()};
  }

 private:
  std::vector<std::string> variables(std::size_t rank) const;
  void start(std::size_t rank);
  void route(std::size_t rank, const Pipe& out, const Pipe& err);
  void wait_for_news();
  void read_stream(Stream& stream);
  static void close_stream(Stream& stream);
  void read_signals();
  void reap();
  void ended(std::size_t rank, int status);
  void fail(std::size_t rank, int code, const std::string& text);
  void stop();
  void look_for_abandoned();
  void kill_if_late();
  void drain();
  void tell_first_failure() const;
  void kill_all(int signal) const;
  bool any_running() const {
    return std::ranges::any_of(
        ranks_, [](const Rank& rank) { return rank.running; });
  }
  bool raw(std::size_t rank) const {
    return options_.output == LaunchOutput::kRankZeroOnly && rank == 0;
  }

  const LaunchOptions& options_;
  const CaughtSignals& signals_;
  int64_t count_; // jobs before this one
  std::vector<Rank> ranks_;
  uint16_t port_;
  Clock::time_point started_;
  std::string status_path_;
  std::shared_ptr<RankStatus[]> statuses_;
  int code_ = 0;
  int signals_passed_ = 0;
  std::optional<Clock::time_point> kill_at_;
  std::optional<std::size_t> deserter_; // ended well, but not in order
  std::optional<std::size_t> first_failed_;
  std::string first_failure_;
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
      {"TESSERA_RESTART", std::to_string(count_)},
      {kRankStatusVariable, status_path_}};
  if (!environment("OMP_NUM_THREADS")) {
    const int64_t share = std::max<int64_t>(1, allowed_cores() / size);
    ours.emplace_back("OMP_NUM_THREADS", std::to_string(share));
  }
  ours.insert(
      ours.end(), options_.environment.begin(), options_.environment.end());
  return environment_with(ours);
}

void Job::start(std::size_t rank) {
  const Pipe out;
  const Pipe err;
  int error = 0;
  ranks_[rank].pid = spawn(
      {.command = options_.command,
       .environment = variables(rank),
       .out = raw(rank) ? STDOUT_FILENO : out.write,
       .err = raw(rank) ? STDERR_FILENO : err.write},
      error);
  ranks_[rank].running = true;
  close(out.write);
  close(err.write);
  route(rank, out, err);
  if (error != 0) {
    fail(
        rank,
        kCannotRun,
        fmt::format(
            "cannot run '{}': {}", options_.command[0], std::strerror(error)));
  }
}

void Job::route(std::size_t rank, const Pipe& out, const Pipe& err) {
  auto& [output, errors] = ranks_[rank].streams;
  output.fd = out.read;
  errors.fd = err.read;
  errors.keeper = &ranks_[rank].tail;
  if (options_.output == LaunchOutput::kPrefixed) {
    const std::string prefix = fmt::format("[{}] ", rank);
    output.forwarder.emplace(STDOUT_FILENO, prefix);
    errors.forwarder.emplace(STDERR_FILENO, prefix);
    output.keeper = &ranks_[rank].tail;
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

// Everything that has ended by now. Processes that the ranks have left to the
// guard are taken leave of too. A rank that was killed is told first: the
// others of the same moment may have ended because of it.
void Job::reap() {
  std::vector<std::pair<std::size_t, int>> gone;
  int status = 0;
  for (pid_t pid = waitpid(-1, &status, WNOHANG); pid > 0;
       pid = waitpid(-1, &status, WNOHANG)) {
    const auto found = std::ranges::find_if(ranks_, [pid](const Rank& rank) {
      return rank.running && rank.pid == pid;
    });
    if (found != ranks_.end()) {
      gone.emplace_back(found - ranks_.begin(), status);
    }
  }
  std::stable_partition(
      gone.begin(), gone.end(), [](const auto& rank_and_status) {
        return WIFSIGNALED(rank_and_status.second);
      });
  for (const auto& [rank, how] : gone) {
    ended(rank, how);
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
  const std::string how = by_signal ? fmt::format(
                                          "was ended by signal {} ({})",
                                          WTERMSIG(status),
                                          strsignal(WTERMSIG(status)))
                                    : fmt::format("ended with code {}", code);
  fail(
      rank,
      code,
      fmt::format("rank {} (pid {}) {}", rank, ranks_[rank].pid, how));
}

// The first failure decides the launcher's code and stops the others. After a
// signal of the user's, which the others have got too, they have the grace to
// end by themselves.
void Job::fail(std::size_t rank, int code, const std::string& text) {
  if (kill_at_) {
    return;
  }
  code_ = code_ == 0 ? code : code_;
  if (signals_passed_ > 0 && code != kCannotRun) {
    kill_at_ = Clock::now() + options_.grace;
    return;
  }
  write_all(
      STDERR_FILENO, fmt::format("tessera: {}; stopping the job\n", text));
  first_failed_ = rank;
  first_failure_ = text;
  stop();
}

void Job::stop() {
  kill_all(SIGTERM);
  kill_at_ = Clock::now() + options_.grace;
}

// The last thing that is written, below what the other ranks said when they
// were stopped.
void Job::tell_first_failure() const {
  if (!first_failed_ || code_ == kCannotRun) {
    return;
  }
  const double seconds =
      std::chrono::duration<double>(Clock::now() - started_).count();
  const std::string lines =
      last_lines(ranks_[*first_failed_].tail.tail(), kLastLines);
  std::string text = fmt::format(
      "tessera: the job failed after {:.1f} s; first: {}",
      seconds,
      first_failure_);
  text += lines.empty() ? "\n" : "; its last lines:\n" + lines;
  write_all(STDERR_FILENO, text);
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
          *deserter_,
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

JobEnd run_job(
    const LaunchOptions& options, const CaughtSignals& signals, int64_t count) {
  return Job(options, signals, count).run();
}

} // namespace tessera
