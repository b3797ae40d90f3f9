// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/peer_failure.h>
#include <tessera/comm/rendezvous.h>

#include <algorithm>
#include <string_view>

namespace tessera {
namespace {

// The same on all ranks, whatever library hashes there: FNV-1a.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 14695981039346656037U;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  }
  return hash;
}

bool is_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos ||
      text.find("imeout") != std::string::npos;
}

} // namespace

void stop_transfer(c10d::Work& transfer) {
  try {
    transfer.abort();
  } catch (const std::exception&) {
    return;
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

PeerFailure::PeerFailure(const GroupSetup& setup, std::string backend)
    : peers_(setup.peers),
      world_ranks_(setup.world_ranks),
      group_(hash_of(setup.id)),
      backend_(std::move(backend)),
      timeout_(setup.timeout) {}

std::exception_ptr PeerFailure::explain(
    const FailedCall& call, const std::exception& error) const {
  const std::string what = brief(error);
  const bool timed_out = is_timeout(what);
  const int64_t suspect = call.suspect < 0
      ? -1
      : world_ranks_[static_cast<std::size_t>(call.suspect)];
  const bool only_suspect = call.message && timed_out && suspect >= 0;
  const CallPlace place{.group = group_, .seq = only_suspect ? 0 : call.seq};
  Culprit culprit{.late = timed_out, .text = {}};
  if (peers_) {
    culprit = peers_->find(
        only_suspect ? std::span<const int64_t>(&suspect, 1)
                     : std::span<const int64_t>(world_ranks_),
        suspect,
        timed_out,
        place);
  }
  if (culprit.text.empty()) {
    culprit.text =
        suspect < 0 || !peers_ ? "a peer" : peers_->describe(suspect);
    culprit.text += timed_out
        ? ", did not answer in time; is it still running?"
        : ", went away or called something else; look at its output";
  }
  const std::string limit =
      timed_out ? fmt::format("timeout of {} ms; ", timeout_.count()) : "";
  const std::string text = fmt::format(
      "{}: {} ({}{}: {})", call.where, culprit.text, limit, backend_, what);
  return culprit.late ? std::make_exception_ptr(TimeoutError(text))
                      : std::make_exception_ptr(PeerError(text));
}

std::string PeerFailure::end_of(int64_t world_rank) const {
  return peers_->find(world_ranks_, world_rank, false, {}).text;
}

bool PeerFailure::in_group(int64_t world_rank) const {
  return std::ranges::find(world_ranks_, world_rank) != world_ranks_.end();
}

void PeerFailure::note(CollectiveKind kind, uint64_t seq) const {
  if (peers_) {
    peers_->note(kind, {.group = group_, .seq = seq});
  }
}

void PeerFailure::add_message(c10d::Work* work) {
  const std::scoped_lock lock(mutex_);
  messages_.insert(work);
  if (!stopped_.empty()) {
    stop_transfer(*work);
  }
}

void PeerFailure::remove_message(c10d::Work* work) {
  const std::scoped_lock lock(mutex_);
  messages_.erase(work);
}

void PeerFailure::stop_messages(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  stopped_ = stopped_.empty() ? reason : stopped_;
  for (c10d::Work* work : messages_) {
    stop_transfer(*work);
  }
}

std::string PeerFailure::stopped() const {
  const std::scoped_lock lock(mutex_);
  return stopped_;
}

} // namespace tessera
