// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/process_state.h>
#include <tessera/comm/rank_text.h>
#include <tessera/comm/rendezvous.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>

namespace tessera {

struct PeerStatus {
  alignas(64) std::atomic<uint64_t> group; // of the last operation
  std::atomic<uint64_t> seq;
  std::atomic<uint32_t> kind; // of the last operation, plus 1; 0: none yet
  std::atomic<uint32_t> left;
  // 0: has not failed. What follows is written before it is set.
  std::atomic<uint32_t> failed;
  std::atomic<uint32_t> late;
  std::atomic<int64_t> culprit; // of the world; itself when it began
  std::array<char, 1500> text; // about the culprit
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::seconds(2); // for a culprit
constexpr int kBetweenLooksMs = 20;

std::shared_ptr<PeerStatus> map_status(int fd) {
  void* memory = mmap(
      nullptr, sizeof(PeerStatus), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  return {static_cast<PeerStatus*>(memory), [](PeerStatus* status) {
            munmap(status, sizeof(PeerStatus));
          }};
}

// Another rank's status; null when it cannot be opened (any more). Both numbers
// come from a peer: what they lead to must be memory of the right size.
std::shared_ptr<PeerStatus> open_status(int64_t pid, int64_t fd_there) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, fd_there);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return nullptr;
  }
  struct stat status {};
  const bool fits = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
      status.st_size == static_cast<off_t>(sizeof(PeerStatus));
  auto mapped = fits ? map_status(fd) : nullptr;
  close(fd);
  return mapped;
}

std::string key_of(int64_t rank) {
  return fmt::format("peer/{}", rank);
}
std::string gone_key(int64_t rank) {
  return fmt::format("gone/{}", rank);
}

} // namespace

std::shared_ptr<PeerWatch> PeerWatch::open(const PeerWatchOptions& options) {
  std::shared_ptr<PeerWatch> watch(new PeerWatch(options));
  watch->publish_self(options.machine);
  watch->meet_peers(options);
  watch->thread_ = std::thread([&self = *watch] { self.run(); });
  return watch;
}

PeerWatch::PeerWatch(const PeerWatchOptions& options)
    : store_(options.store), rank_(options.rank) {
  memory_fd_ = memfd_create("tessera-rank", MFD_CLOEXEC);
  if (memory_fd_ >= 0 && fchmod(memory_fd_, S_IRUSR | S_IWUSR) == 0 &&
      ftruncate(memory_fd_, sizeof(PeerStatus)) == 0) {
    self_ = map_status(memory_fd_);
  }
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (!self_ || stop_fd_ < 0) {
    const int error = errno;
    for (const int fd : {memory_fd_, stop_fd_}) {
      if (fd >= 0) {
        close(fd);
      }
    }
    throw IoError(fmt::format(
        "init [rank {}/{}]: shared memory: {}",
        options.rank,
        options.size,
        std::strerror(error)));
  }
}

PeerWatch::~PeerWatch() {
  leave();
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_fd_, &one, sizeof(one));
  if (thread_.joinable()) {
    thread_.join();
  }
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) {
      close(peer.pidfd);
    }
  }
  close(stop_fd_);
  close(memory_fd_);
}

void PeerWatch::publish_self(const std::string& machine) {
  const nlohmann::json self = {
      {"machine", machine},
      {"host", host_name()},
      {"pid", getpid()},
      {"fd", memory_fd_}};
  store_->set(key_of(rank_), self.dump());
}

void PeerWatch::meet_peers(const PeerWatchOptions& options) {
  for (int64_t rank = 0; rank < options.size; ++rank) {
    const std::string text =
        wait_for_key(*store_, key_of(rank), options.timeout);
    const auto json = nlohmann::json::parse(text, nullptr, false);
    Peer peer;
    int64_t fd = -1;
    try {
      peer.pid = json.at("pid").get<int32_t>();
      peer.host = json.at("host").get<std::string>();
      peer.local = json.at("machine").get<std::string>() == options.machine;
      fd = json.at("fd").get<int32_t>();
    } catch (const nlohmann::json::exception& error) {
      throw PeerError(fmt::format(
          "init [rank {}/{}]: rank {} wrote {} into the store, which does not "
          "describe a rank ({})",
          options.rank,
          options.size,
          rank,
          text,
          error.what()));
    }
    one_machine_ = one_machine_ && peer.local;
    if (rank == rank_) {
      peer.status = self_;
    } else if (peer.local) {
      peer.status = open_status(peer.pid, fd);
      if (peer.pid != getpid()) {
        peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
      }
    }
    peers_.push_back(std::move(peer));
  }
}

void PeerWatch::note(CollectiveKind kind, const CallPlace& place) {
  self_->group.store(place.group, std::memory_order_relaxed);
  self_->seq.store(place.seq, std::memory_order_relaxed);
  self_->kind.store(static_cast<uint32_t>(kind) + 1, std::memory_order_release);
}

void PeerWatch::leave() {
  self_->left.store(1, std::memory_order_release);
}

void PeerWatch::fail(const std::string& reason) {
  publish({.rank = rank_, .text = describe(rank_) + ", failed: " + reason});
}

uint64_t PeerWatch::add_listener(std::function<void(int64_t rank)> listener) {
  const std::scoped_lock lock(listeners_mutex_);
  listeners_[next_listener_] = std::move(listener);
  return next_listener_++;
}

void PeerWatch::remove_listener(uint64_t id) {
  const std::scoped_lock lock(listeners_mutex_);
  listeners_.erase(id);
}

// Waits for processes to end. One that has left its world is no news.
void PeerWatch::run() {
  std::vector<pollfd> polled{{.fd = stop_fd_, .events = POLLIN, .revents = 0}};
  std::vector<int64_t> ranks{-1};
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].pidfd >= 0) {
      polled.push_back(
          {.fd = peers_[rank].pidfd, .events = POLLIN, .revents = 0});
      ranks.push_back(static_cast<int64_t>(rank));
    }
  }
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
      return;
    }
    if (polled[0].revents != 0) {
      return;
    }
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) {
        continue;
      }
      polled[i].fd = -1; // negative ones are passed over
      const auto& status = peer(ranks[i]).status;
      if (status && status->left.load(std::memory_order_acquire) != 0) {
        continue;
      }
      const std::scoped_lock lock(listeners_mutex_);
      for (const auto& [id, listener] : listeners_) {
        listener(ranks[i]);
      }
    }
  }
}

bool PeerWatch::has_ended(const Peer& peer) const {
  pollfd query{.fd = peer.pidfd, .events = POLLIN, .revents = 0};
  return peer.pidfd >= 0 && poll(&query, 1, 0) > 0;
}

bool PeerWatch::is_done(int64_t rank) const {
  const Peer& peer = this->peer(rank);
  const PeerStatus* status = peer.status.get();
  return has_ended(peer) ||
      (status != nullptr &&
       (status->left.load(std::memory_order_acquire) != 0 ||
        status->failed.load(std::memory_order_acquire) != 0));
}

std::string PeerWatch::describe(int64_t rank) const {
  const Peer& peer = this->peer(rank);
  std::string text = rank_text(rank, rank, peer.pid, peer.host);
  if (peer.status) {
    const uint32_t kind = peer.status->kind.load(std::memory_order_acquire);
    const auto last = static_cast<uint32_t>(kLastCollective) + 1;
    if (kind > 0 && kind <= last) {
      text += last_operation_text(
          name_of(static_cast<CollectiveKind>(kind - 1)),
          peer.status->seq.load(std::memory_order_relaxed));
    }
  }
  return text;
}

// A rank whose process has ended, or that has left, or failed by itself.
std::optional<Culprit> PeerWatch::gone(int64_t rank) const {
  const Peer& peer = this->peer(rank);
  const PeerStatus* status = peer.status.get();
  if (status != nullptr &&
      status->failed.load(std::memory_order_acquire) != 0) {
    if (status->culprit.load() == rank) {
      return Culprit{.rank = rank, .text = std::string(text_in(status->text))};
    }
    return std::nullopt; // it only followed another
  }
  if (status != nullptr && status->left.load(std::memory_order_acquire) != 0) {
    return Culprit{
        .rank = rank,
        .text = describe(rank) +
            ", has left the world while others wait for it; look at its "
            "output"};
  }
  if (has_ended(peer)) {
    return Culprit{
        .rank = rank,
        .text = describe(rank) +
            ", died while others wait for it; look at its output"};
  }
  return std::nullopt;
}

std::optional<Culprit> PeerWatch::blamed_by_others(
    std::span<const int64_t> ranks) const {
  for (const int64_t rank : ranks) {
    const PeerStatus* status = peer(rank).status.get();
    if (rank == rank_ || status == nullptr ||
        status->failed.load(std::memory_order_acquire) == 0) {
      continue;
    }
    const int64_t culprit = status->culprit.load();
    const bool late = status->late.load() != 0;
    if (culprit == rank_) {
      return Culprit{
          .rank = rank_,
          .late = late,
          .text = describe(rank) + ", gave up waiting for this rank"};
    }
    return Culprit{
        .rank = culprit,
        .late = late,
        .text = std::string(text_in(status->text))};
  }
  return std::nullopt;
}

// Those of this machine who have not called what this rank has.
std::optional<Culprit> PeerWatch::stayed_behind(
    std::span<const int64_t> ranks, const CallPlace& place) const {
  Culprit culprit{.late = true, .text = {}};
  for (const int64_t rank : ranks) {
    const Peer& peer = this->peer(rank);
    if (rank == rank_ || !peer.status) {
      continue;
    }
    const bool here = peer.status->kind.load(std::memory_order_acquire) != 0 &&
        peer.status->group.load() == place.group &&
        peer.status->seq.load() >= place.seq;
    const bool stopped = peer.pid != getpid() && is_stopped(peer.pid);
    if (here && !stopped) {
      continue;
    }
    culprit.rank = culprit.rank < 0 ? rank : culprit.rank;
    culprit.text += culprit.text.empty() ? "" : "; ";
    culprit.text += describe(rank) +
        (stopped ? ", is stopped by a signal" : ", did not arrive in time");
  }
  if (culprit.rank < 0) {
    return std::nullopt;
  }
  return culprit;
}

std::optional<Culprit> PeerWatch::told_by_store(
    std::span<const int64_t> ranks) {
  if (one_machine_) {
    return std::nullopt;
  }
  try {
    for (const int64_t rank : ranks) {
      if (rank != rank_ && store_->check({gone_key(rank)})) {
        return Culprit{
            .rank = rank, .text = store_->get_to_str(gone_key(rank))};
      }
    }
  } catch (const std::exception& error) {
    return Culprit{
        .text =
            "the store, which rank 0 or the launcher serves, does not "
            "answer either; look at their output (" +
            brief(error) + ")"};
  }
  return std::nullopt;
}

std::optional<Culprit> PeerWatch::look(
    std::span<const int64_t> ranks, bool timed_out, const CallPlace& place) {
  for (const int64_t rank : ranks) {
    auto culprit = rank == rank_ ? std::nullopt : gone(rank);
    if (culprit) {
      return culprit;
    }
  }
  if (auto culprit = blamed_by_others(ranks)) {
    return culprit;
  }
  if (timed_out) {
    if (auto culprit = stayed_behind(ranks, place)) {
      return culprit;
    }
  }
  return told_by_store(ranks);
}

// A rank of another machine that broke its connection and told nothing.
Culprit PeerWatch::unheard_of(int64_t suspect) const {
  if (suspect < 0) {
    return {};
  }
  return {
      .rank = suspect,
      .text =
          describe(suspect) + ", went away without a word; look at its output"};
}

Culprit PeerWatch::find(
    std::span<const int64_t> ranks,
    int64_t suspect,
    bool timed_out,
    const CallPlace& place) {
  const auto end = Clock::now() + kLook;
  while (true) {
    auto culprit = look(ranks, timed_out, place);
    if (!culprit && Clock::now() >= end) {
      culprit = unheard_of(timed_out ? -1 : suspect);
    }
    if (culprit) {
      culprit->late = culprit->late || (timed_out && culprit->rank < 0);
      publish(*culprit);
      return *culprit;
    }
    poll(nullptr, 0, kBetweenLooksMs);
  }
}

// The first failure of a rank stays: what comes later follows from it.
void PeerWatch::publish(const Culprit& culprit) {
  const std::scoped_lock lock(publish_mutex_); // groups fail side by side
  if (culprit.rank < 0 || self_->failed.load() != 0) {
    return;
  }
  self_->culprit.store(culprit.rank);
  self_->late.store(culprit.late ? 1 : 0);
  copy_text(self_->text.data(), self_->text.size(), culprit.text);
  self_->failed.store(1, std::memory_order_release);
  if (one_machine_) {
    return;
  }
  try {
    store_->set(gone_key(culprit.rank), culprit.text);
  } catch (const std::exception&) { // it may have gone with rank 0
    return;
  }
}

} // namespace tessera
