// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/call_header.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/shm_engine.h>
#include <tessera/comm/shm_futex.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>

namespace tessera {
namespace {

constexpr std::chrono::microseconds kSlice =
    std::chrono::milliseconds(50); // between two looks at the peers
constexpr std::chrono::microseconds kMessageSlice{
    200}; // while messages wait to be moved beside a collective
constexpr int kSpins =
    300; // about ten microseconds, where every rank has a core of its own

int allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

int open_pidfd(int pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

// The process behind `pidfd` has ended, whether or not its parent has noticed.
bool has_ended(int pidfd, int pid) {
  if (pidfd < 0) {
    return kill(pid, 0) != 0 && errno == ESRCH;
  }
  pollfd query{.fd = pidfd, .events = POLLIN, .revents = 0};
  return poll(&query, 1, 0) > 0;
}

bool at_or_past(uint32_t value, uint32_t target) { // steps wrap around
  return static_cast<int32_t>(value - target) >= 0;
}

} // namespace

ShmEngine::ShmEngine(std::shared_ptr<ShmWindow> window, const GroupSetup& setup)
    : window_(std::move(window)),
      rank_(setup.rank),
      size_(setup.size()),
      name_(setup.name),
      timeout_(setup.timeout),
      spins_(size_ <= allowed_cores() ? kSpins : 0),
      messages_(*window_, setup.rank) {
  ShmMember& self = window_->member(rank_);
  self.pid = getpid();
  copy_text(self.host.data(), self.host.size(), host_name());
  self.state.store(MemberState::kPresent, std::memory_order_release);
  meet_at_store(*setup.store, "present", rank_, size_, timeout_);
  for (int64_t peer = 0; peer < size_; ++peer) {
    const int pid = window_->member(peer).pid;
    pidfds_.push_back(pid == getpid() ? -1 : open_pidfd(pid));
  }
}

void ShmEngine::leave() {
  window_->member(rank_).state.store(
      MemberState::kLeft, std::memory_order_release);
  wake_everyone();
}

void ShmEngine::wake_everyone() {
  futex_wake_all(window_->control().step);
  for (int64_t rank = 0; rank < size_; ++rank) {
    window_->member(rank).doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(window_->member(rank).doorbell);
  }
}

ShmEngine::~ShmEngine() {
  leave();
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) {
      close(pidfd);
    }
  }
}

std::string ShmEngine::who(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  return fmt::format(
      "rank {} (pid {}, host {})", rank, member.pid, member.host.data());
}

std::string ShmEngine::where() const {
  return fmt::format(
      "{} [rank {}/{}, group {}, seq {}]",
      operation_,
      rank_,
      size_,
      name_,
      seq_);
}

void ShmEngine::publish(FailureKind kind, const std::string& text) {
  ShmControl& control = window_->control();
  auto expected = FailureState::kNone;
  if (control.failure.compare_exchange_strong(
          expected, FailureState::kBeingWritten)) {
    control.failure_kind = kind;
    copy_text(control.failure_text.data(), control.failure_text.size(), text);
    control.failure.store(FailureState::kPublished, std::memory_order_release);
  }
  wake_everyone();
}

void ShmEngine::fail(FailureKind kind, const std::string& text) {
  const std::string message = where() + ": " + text;
  publish(kind, message);
  if (kind == FailureKind::kTimeout) {
    throw TimeoutError(message);
  }
  throw PeerError(message);
}

void ShmEngine::abort(const std::string& reason) {
  publish(FailureKind::kPeer, who(rank_) + " failed: " + reason);
}

void ShmEngine::throw_if_failed() {
  const ShmControl& control = window_->control();
  const auto state = control.failure.load(std::memory_order_acquire);
  if (state == FailureState::kNone) {
    return;
  }
  if (!checked_) {
    compare_headers(/*only_arrived=*/true); // this rank's own view of a
                                            // mismatch says more than a peer's
  }
  std::string reported = "a rank died while it reported an error";
  auto kind = FailureKind::kPeer;
  for (int tries = 0; tries < 1000; ++tries) {
    if (control.failure.load(std::memory_order_acquire) ==
        FailureState::kPublished) {
      reported = control.failure_text.data();
      kind = control.failure_kind;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::string message =
      where() + ": the group is dead; first error: " + reported;
  if (kind == FailureKind::kTimeout) {
    throw TimeoutError(message);
  }
  throw PeerError(message);
}

void ShmEngine::announce(const CallDescription& call) {
  operation_ = name_of(call.kind);
  throw_if_failed(); // before the header: peers may still compare the last one
  ++seq_;
  CallHeader& header = window_->header(rank_, seq_);
  header = header_of(call, seq_);
  header_ = &header;
  int64_t* counts = window_->counts(rank_, seq_);
  std::copy(call.counts.begin(), call.counts.end(), counts);
  std::copy(call.out_counts.begin(), call.out_counts.end(), counts + size_);
  checked_ = false;
}

void ShmEngine::meet() {
  ++step_;
  arrive();
  wait_for_peers();
  if (!checked_) {
    compare_headers(/*only_arrived=*/false);
    checked_ = true;
  }
}

void ShmEngine::arrive() {
  ShmControl& control = window_->control();
  const uint32_t arrivals =
      control.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  window_->member(rank_).arrived.store(step_, std::memory_order_release);
  if (arrivals == step_ * static_cast<uint32_t>(size_)) {
    control.step.store(step_, std::memory_order_seq_cst);
    if (control.sleepers.load(std::memory_order_seq_cst) != 0) {
      futex_wake_all(control.step);
    }
  }
}

bool ShmEngine::reached() const {
  return at_or_past(
      window_->control().step.load(std::memory_order_acquire), step_);
}

void ShmEngine::wait_for_peers() {
  for (int spin = 0; spin < spins_; ++spin) {
    if (reached()) {
      return;
    }
    spin_pause();
  }
  const auto start = Clock::now();
  while (!reached()) {
    sleep(messages_.pending() ? kMessageSlice : kSlice);
    messages_.pump();
    if (!reached()) {
      throw_if_failed();
      watch_peers(start);
    }
  }
}

void ShmEngine::sleep(std::chrono::microseconds limit) {
  ShmControl& control = window_->control();
  control.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = control.step.load(std::memory_order_seq_cst);
  if (!at_or_past(seen, step_)) {
    futex_wait(control.step, seen, limit);
  }
  control.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool ShmEngine::has_arrived(int64_t rank) const {
  return at_or_past(
      window_->member(rank).arrived.load(std::memory_order_acquire), step_);
}

bool ShmEngine::is_gone(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  if (member.state.load(std::memory_order_acquire) == MemberState::kLeft) {
    return true;
  }
  return member.pid != getpid() &&
      has_ended(pidfds_[static_cast<std::size_t>(rank)], member.pid);
}

void ShmEngine::watch_peers(Clock::time_point waiting_since) {
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || has_arrived(peer) || !is_gone(peer) ||
        has_arrived(peer)) {
      continue;
    }
    const bool left = window_->member(peer).state.load(
                          std::memory_order_acquire) == MemberState::kLeft;
    fail(
        FailureKind::kPeer,
        who(peer) + (left ? " has left the world" : " died") +
            " while others wait for it here; look at its output");
  }
  if (Clock::now() - waiting_since < timeout_) {
    return;
  }
  std::string missing;
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (!has_arrived(peer)) {
      missing += (missing.empty() ? "" : ", ") + who(peer);
    }
  }
  fail(
      FailureKind::kTimeout,
      fmt::format(
          "{} did not arrive within {} ms; is it still running, and does it "
          "call the same?",
          missing,
          timeout_.count()));
}

ShmTransferPtr ShmEngine::start_send(
    const at::Tensor& tensor, int64_t peer, int tag) {
  const std::scoped_lock lock(mutex_);
  operation_ = "send";
  throw_if_failed();
  auto transfer = messages_.send(tensor, peer, tag);
  messages_.pump();
  return transfer;
}

ShmTransferPtr ShmEngine::start_recv(
    const at::Tensor& tensor, int64_t peer, int tag) {
  const std::scoped_lock lock(mutex_);
  operation_ = "recv";
  throw_if_failed();
  auto transfer = messages_.recv(tensor, peer, tag);
  messages_.pump();
  return transfer;
}

bool ShmEngine::poll(const ShmTransfer& transfer) {
  const std::scoped_lock lock(mutex_);
  if (!transfer.done) {
    messages_.pump();
    if (!transfer.done) {
      throw_if_failed();
    }
  }
  if (!transfer.mismatch.empty()) {
    fail(FailureKind::kPeer, transfer.mismatch);
  }
  return transfer.done;
}

void ShmEngine::finish(const ShmTransfer& transfer) {
  ShmMember& self = window_->member(rank_);
  auto start = Clock::now();
  uint64_t moved = 0;
  while (true) {
    const uint32_t seen = self.doorbell.load(std::memory_order_seq_cst);
    if (poll(transfer)) {
      return;
    }
    if (transfer.moved != moved) { // the timeout counts from the last progress
      moved = transfer.moved;
      start = Clock::now();
    }
    watch_message_peer(transfer, start);
    self.sleeping.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(self.doorbell, seen, kSlice);
    self.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void ShmEngine::watch_message_peer(
    const ShmTransfer& transfer, Clock::time_point waiting_since) {
  const bool late = Clock::now() - waiting_since >= timeout_;
  if (!late && !is_gone(transfer.peer)) {
    return;
  }
  if (poll(transfer)) { // the peer may have finished its part before it went
    return;
  }
  const std::scoped_lock lock(mutex_);
  const std::string what = fmt::format(
      "{} {} {}, tag {}",
      transfer.outgoing ? "send to" : "recv from",
      who(transfer.peer),
      transfer.text(),
      transfer.tag);
  if (late) {
    fail(
        FailureKind::kTimeout,
        fmt::format("{}: nothing moved within {} ms", what, timeout_.count()));
  }
  fail(
      FailureKind::kPeer,
      what + ": that rank died or has left the world; look at its output");
}

void ShmEngine::compare_headers(bool only_arrived) {
  const auto announcement = [&](int64_t rank) {
    const int64_t* counts = window_->counts(rank, seq_);
    const auto n = static_cast<std::size_t>(size_);
    return Announcement{
        window_->header(rank, seq_), {counts, n}, {counts + size_, n}};
  };
  const Announcement mine = announcement(rank_);
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (only_arrived && !has_arrived(peer))) {
      continue;
    }
    const Announcement theirs = announcement(peer);
    const char* mismatch = find_mismatch(mine, theirs);
    if (mismatch != nullptr) {
      checked_ = true;
      fail(
          FailureKind::kPeer,
          fmt::format(
              "{} here, {} on {} (its seq {}); {} must match",
              describe(mine),
              describe(theirs),
              who(peer),
              theirs.header.seq,
              mismatch));
    }
  }
  if (header_->kind == CollectiveKind::kAllToAll && !only_arrived) {
    compare_counts_of_pairs();
  }
}

void ShmEngine::compare_counts_of_pairs() {
  for (int64_t from = 0; from < size_; ++from) {
    for (int64_t to = 0; to < size_; ++to) {
      const int64_t gives = window_->counts(from, seq_)[to];
      const int64_t takes = window_->counts(to, seq_)[size_ + from];
      if (gives != takes) {
        checked_ = true;
        fail(
            FailureKind::kPeer,
            fmt::format(
                "{} gives {} elements to {}, which takes {}; counts must match",
                who(from),
                gives,
                who(to),
                takes));
      }
    }
  }
}

} // namespace tessera
