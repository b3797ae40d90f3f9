// SPDX-License-Identifier: Apache-2.0
// How a rank notices that something is wrong, and how all of them end then.
#include <fmt/format.h>
#include <poll.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/process_state.h>
#include <tessera/comm/shm_engine.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {
namespace {

constexpr auto kReaderPatience = std::chrono::seconds(2);

// The process behind `pidfd` has ended, whether or not its parent has noticed.
bool has_ended(int pidfd, int pid) {
  if (pidfd < 0) {
    return kill(pid, 0) != 0 && errno == ESRCH;
  }
  pollfd query{.fd = pidfd, .events = POLLIN, .revents = 0};
  return poll(&query, 1, 0) > 0;
}

// Outlives the engine: a rank that does not answer may go on writing into it
// at any time, whatever has become of the group.
void keep_for_ever(at::Tensor tensor) {
  static std::mutex mutex;
  static auto* kept = new std::vector<at::Tensor>;
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(tensor));
}

[[noreturn]] void throw_error(FailureKind kind, const std::string& message) {
  if (kind == FailureKind::kTimeout) {
    throw TimeoutError(message);
  }
  throw PeerError(message);
}

} // namespace

std::string ShmEngine::identity_of(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  return fmt::format(
      "rank {} (pid {}, host {}", rank, member.pid, text_in(member.host));
}

// Of this rank only where it cannot begin another call meanwhile.
std::string ShmEngine::who(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  const uint64_t calls = member.calls.load(std::memory_order_acquire);
  std::string last = "no call yet";
  if (calls > 0) {
    const int64_t* counts = window_->counts(rank, calls);
    const auto n = static_cast<std::size_t>(size_);
    last = fmt::format(
        "last call {}, seq {}",
        describe(
            {window_->header(rank, calls), {counts, n}, {counts + size_, n}}),
        calls);
  }
  return identity_of(rank) + ", " + last + ")";
}

std::string ShmEngine::where(std::string_view operation) const {
  return fmt::format(
      "{} [rank {}/{}, group {}, seq {}]",
      operation,
      rank_,
      size_,
      name_,
      seq());
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
  const std::string message = where(operation_) + ": " + text;
  publish(kind, message);
  give_up(kind, message);
}

void ShmEngine::give_up(FailureKind kind, const std::string& message) {
  leave_no_reader();
  throw_error(kind, message);
}

void ShmEngine::fail_message(
    bool outgoing, FailureKind kind, const std::string& text) {
  const std::string message = where(outgoing ? "send" : "recv") + ": " + text;
  publish(kind, message);
  throw_error(kind, message);
}

// The caller frees its buffers after the error. A peer may be in the middle of
// using them, which takes no longer than the memory needs; what a peer that is
// stopped, or does not get on, may still use is never freed.
void ShmEngine::leave_no_reader() {
  window_->member(rank_).touching.store(0, std::memory_order_seq_cst);
  if (std::ranges::none_of(given_, &at::Tensor::defined)) {
    return;
  }
  const auto start = Clock::now();
  for (int64_t peer = 0; peer < size_; ++peer) {
    const ShmMember& member = window_->member(peer);
    while (member.touching.load(std::memory_order_seq_cst) != 0 &&
           !is_gone(peer)) {
      if (is_stopped(member.pid) || Clock::now() - start > kReaderPatience) {
        for (at::Tensor& tensor : given_) {
          keep_for_ever(std::exchange(tensor, at::Tensor()));
        }
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  given_ = {};
}

void ShmEngine::abort(const std::string& reason) {
  // Another thread may be in a call, or begin one.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  publish(
      FailureKind::kPeer,
      (lock.owns_lock() ? who(rank_) : identity_of(rank_) + ", in a call)") +
          " failed: " + reason);
}

// What the first rank to fail told, once it is readable.
std::optional<ShmEngine::Failure> ShmEngine::published_failure() const {
  const ShmControl& control = window_->control();
  // In one order with `touching`: see TouchScope.
  const auto state = control.failure.load(std::memory_order_seq_cst);
  if (state == FailureState::kNone) {
    return std::nullopt;
  }
  for (int tries = 0; tries < 1000; ++tries) {
    if (control.failure.load(std::memory_order_acquire) ==
        FailureState::kPublished) {
      return Failure{
          control.failure_kind,
          std::string("the group is dead; first error: ")
              .append(text_in(control.failure_text))};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Failure{
      FailureKind::kPeer,
      "the group is dead; a rank died while it reported an error"};
}

void ShmEngine::throw_if_failed() {
  const auto failure = published_failure();
  if (!failure) {
    return;
  }
  if (!checked_) {
    compare_headers(/*only_arrived=*/true); // this rank's own view of a
                                            // mismatch says more than a peer's
  }
  give_up(failure->kind, where(operation_) + ": " + failure->text);
}

void ShmEngine::throw_if_dead(bool outgoing) const {
  if (const auto failure = published_failure()) {
    throw_error(
        failure->kind,
        where(outgoing ? "send" : "recv") + ": " + failure->text);
  }
}

bool ShmEngine::is_gone(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  if (member.state.load(std::memory_order_acquire) == MemberState::kLeft) {
    return true;
  }
  return member.pid != getpid() &&
      has_ended(pidfds_[static_cast<std::size_t>(rank)], member.pid);
}

// " died", " has left the world", " is stopped by a signal", or nothing.
std::string ShmEngine::fate_of(int64_t rank) const {
  const ShmMember& member = window_->member(rank);
  if (member.state.load(std::memory_order_acquire) == MemberState::kLeft) {
    return " has left the world";
  }
  if (is_gone(rank)) {
    return " died";
  }
  return is_stopped(member.pid) ? " is stopped by a signal" : "";
}

void ShmEngine::watch_peers(Clock::time_point waiting_since) {
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || has_arrived(peer) || !is_gone(peer) ||
        has_arrived(peer)) {
      continue;
    }
    fail(
        FailureKind::kPeer,
        who(peer) + fate_of(peer) +
            " while others wait for it here; look at its output");
  }
  if (Clock::now() - waiting_since < timeout_) {
    return;
  }
  std::string missing;
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (!has_arrived(peer)) {
      missing += (missing.empty() ? "" : ", ") + who(peer) + fate_of(peer);
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

void ShmEngine::watch_message_peer(
    const ShmTransfer& transfer, Clock::time_point waiting_since) {
  const bool late = Clock::now() - waiting_since >= timeout_;
  if (!late && !is_gone(transfer.peer)) {
    return;
  }
  if (poll(transfer)) { // the peer may have finished its part before it went
    return;
  }
  const std::string what = fmt::format(
      "{} {}){} {}, tag {}",
      transfer.outgoing ? "send to" : "recv from",
      identity_of(transfer.peer),
      late ? fate_of(transfer.peer) : "",
      transfer.text(),
      transfer.tag);
  if (late) {
    fail_message(
        transfer.outgoing,
        FailureKind::kTimeout,
        fmt::format("{}: nothing moved within {} ms", what, timeout_.count()));
  }
  fail_message(
      transfer.outgoing,
      FailureKind::kPeer,
      what + ": that rank died or has left the world; look at its output");
}

// One number per peer tells that all is well; what is wrong tell the headers.
void ShmEngine::check_headers() {
  const uint64_t own = window_->member(rank_).fingerprints[seq_ % 2];
  bool same = true;
  for (int64_t peer = 0; peer < size_; ++peer) {
    same = same && window_->member(peer).fingerprints[seq_ % 2] == own;
  }
  if (!same || header_->kind == CollectiveKind::kAllToAll) {
    compare_headers(/*only_arrived=*/false);
  }
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
  // So that no sum of them, in bytes, overflows.
  const int64_t most = std::numeric_limits<int64_t>::max() /
      static_cast<int64_t>(sizeof(c10::complex<double>)) / size_;
  for (int64_t from = 0; from < size_; ++from) {
    for (int64_t to = 0; to < size_; ++to) {
      const int64_t gives = window_->counts(from, seq_)[to];
      const int64_t takes = window_->counts(to, seq_)[size_ + from];
      if (gives != takes || gives < 0 || gives > most) {
        checked_ = true;
        fail(
            FailureKind::kPeer,
            fmt::format(
                "{} gives {} elements to {}, which takes {}; counts must match "
                "and "
                "be possible",
                who(from),
                gives,
                who(to),
                takes));
      }
    }
  }
}

} // namespace tessera
