// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sched.h>
#include <sys/syscall.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/call_header.h>
#include <tessera/comm/process_state.h>
#include <tessera/comm/progress_thread.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/shm_engine.h>
#include <tessera/comm/shm_futex.h>
#include <unistd.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr std::chrono::microseconds kSlice =
    std::chrono::milliseconds(50); // between two looks at the peers
// Where every rank has a core of its own, some fifty microseconds. Where ranks
// outnumber the cores the peers need this one: yielding lets them run, and
// costs less than a sleep.
constexpr int kSpins = 1500;
constexpr int kYields = 100;

int open_pidfd(int pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

// What all ranks' calls have in common when they match, in one number.
uint64_t fingerprint_of(const CallDescription& call, uint64_t seq) {
  uint64_t hash = seq;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  };
  mix(static_cast<uint64_t>(call.kind) << 32 |
      static_cast<uint64_t>(call.dtype) << 8 |
      (call.op ? static_cast<uint64_t>(*call.op) + 1 : 0));
  mix(static_cast<uint64_t>(call.root));
  if (call.shape) {
    mix(call.shape->size());
    for (const int64_t extent : *call.shape) {
      mix(static_cast<uint64_t>(extent));
    }
  } else if (call.kind != CollectiveKind::kAllToAll) {
    for (const int64_t count : call.counts) {
      mix(static_cast<uint64_t>(count));
    }
  }
  return hash;
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
      messages_(*window_, setup.rank),
      attached_(static_cast<std::size_t>(size_)) {
  ShmMember& self = window_->member(rank_);
  places_.fill(std::vector<std::byte*>(static_cast<std::size_t>(size_)));
  self.pid = getpid();
  copy_text(self.host.data(), self.host.size(), host_name());
  self.state.store(MemberState::kPresent, std::memory_order_release);
  meet_at_store(*setup.store, "present", rank_, size_, timeout_);
  for (int64_t peer = 0; peer < size_; ++peer) {
    const int pid = window_->member(peer).pid;
    one_process_ = one_process_ && pid == getpid();
    pidfds_.push_back(pid == getpid() ? -1 : open_pidfd(pid));
  }
}

void ShmEngine::leave() {
  window_->member(rank_).state.store(
      MemberState::kLeft, std::memory_order_release);
  wake_everyone();
}

void ShmEngine::wake_everyone() {
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

ShmOffer ShmEngine::offer_for(const at::Tensor& given) const {
  ShmOffer offer;
  offer.reach = Reach::kStaged;
  if (!given.defined()) {
    return offer;
  }
  auto* const data = static_cast<std::byte*>(given.mutable_data_ptr());
  offer.bytes = given.nbytes();
  if (one_process_) {
    offer.reach = Reach::kAddress;
    offer.address = data;
  } else if (
      const auto range = ShmArena::instance().find(data, given.nbytes())) {
    offer.reach = Reach::kArena;
    offer.range = *range;
  }
  return offer;
}

void ShmEngine::announce(
    const CallDescription& call, std::span<const at::Tensor> given) {
  operation_ = name_of(call.kind);
  throw_if_failed(); // before the header: peers may still compare the last one
  ++seq_;
  ShmMember& self = window_->member(rank_);
  header_ = &window_->header(rank_, seq_);
  *header_ = header_of(call, seq_);
  int64_t* counts = window_->counts(rank_, seq_);
  std::copy(call.counts.begin(), call.counts.end(), counts);
  std::copy(call.out_counts.begin(), call.out_counts.end(), counts + size_);
  self.fingerprints[seq_ % 2] = fingerprint_of(call, seq_);
  self.calls.store(seq_, std::memory_order_release);
  offer_ = &window_->offer(rank_, seq_);
  for (std::size_t number = 0; number < given.size(); ++number) {
    ShmOffer& offer = window_->offer(rank_, seq_, number);
    offer = offer_for(given[number]);
    if (offer.reach != Reach::kStaged) {
      given_[number] = given[number];
    }
  }
  checked_ = false;
}

// Where each rank's gift lies, as the offers say after the first meeting.
// `bytes_of` tells how many of a rank's bytes this call may use; 0: none.
// The first of a call's gifts is looked for first.
void ShmEngine::find_places(
    c10::function_ref<int64_t(int64_t)> bytes_of, std::size_t number) {
  all_in_place_ = number == 0 || all_in_place_;
  any_in_place_ = number != 0 && any_in_place_;
  for (int64_t rank = 0; rank < size_; ++rank) {
    const ShmOffer offer = window_->offer(rank, seq_, number); // looked at once
    const int64_t bytes = bytes_of(rank);
    std::byte*& place = places_[number][static_cast<std::size_t>(rank)];
    place = nullptr;
    if (offer.reach == Reach::kStaged && bytes > 0) {
      all_in_place_ = false;
    } else if (bytes > 0) {
      any_in_place_ = true;
      place = reach(rank, offer, number, bytes);
    }
  }
}

// Nothing that comes from a peer is believed: its range must lie inside a
// memory that it owns.
std::byte* ShmEngine::reach(
    int64_t rank, const ShmOffer& offer, std::size_t number, int64_t bytes) {
  const bool here = offer.reach == Reach::kAddress && one_process_;
  const MemoryAddress& place = offer.range.memory;
  bool good = offer.bytes >= static_cast<uint64_t>(bytes) &&
      (here ||
       (offer.reach == Reach::kArena &&
        place.pid == window_->member(rank).pid));
  std::byte* data = nullptr;
  if (good && here) {
    data = offer.address;
  } else if (good && rank == rank_) {
    data = static_cast<std::byte*>(given_[number].mutable_data_ptr());
  } else if (good) {
    const SharedMemory& memory = memory_of(rank, place);
    const uint64_t size = memory.address().bytes; // not what the offer says
    good = offer.bytes <= size && offer.range.offset <= size - offer.bytes;
    data = good ? memory.data() + offer.range.offset : nullptr;
  }
  if (!good) {
    fail(
        FailureKind::kPeer,
        fmt::format(
            "{} offers {} bytes at offset {} of {}, {} are needed; do all "
            "ranks run the same build?",
            who(rank),
            offer.bytes,
            offer.range.offset,
            place.bytes,
            bytes));
  }
  return data;
}

// A segment of a rank's arena, mapped at its first use.
const SharedMemory& ShmEngine::memory_of(
    int64_t rank, const MemoryAddress& place) {
  auto& known = attached_[static_cast<std::size_t>(rank)];
  const auto found = std::ranges::find(known, place.nonce, &Attached::nonce);
  if (found != known.end()) {
    return *found->memory;
  }
  try {
    known.push_back({place.nonce, SharedMemory::attach(place)});
    return *known.back().memory;
  } catch (const Error& error) {
    fail(
        FailureKind::kPeer,
        fmt::format(
            "cannot reach the memory of {}: {}", who(rank), error.what()));
  }
}

void ShmEngine::meet() {
  ++step_;
  arrive();
  wait_for_peers();
  if (!checked_) {
    check_headers();
    checked_ = true;
  }
}

void ShmEngine::arrive() {
  // Either this rank sees that a peer sleeps, or the peer sees the arrival.
  window_->member(rank_).arrived.store(step_, std::memory_order_seq_cst);
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      wake_if_sleeping(peer);
    }
  }
}

void ShmEngine::wake_if_sleeping(int64_t rank) const {
  ShmMember& member = window_->member(rank);
  if (member.sleeping.load(std::memory_order_seq_cst) != 0) {
    member.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(member.doorbell);
  }
}

void ShmEngine::wait_for_peers() {
  int64_t missing = 0; // the first rank not seen here
  const auto all_here = [&] {
    while (missing < size_ && has_arrived(missing)) {
      ++missing;
    }
    return missing == size_;
  };
  for (int spin = 0; spin < spins_ && !waits_quietly(); ++spin) {
    if (all_here()) {
      return;
    }
    spin_pause();
  }
  for (int yield = 0; yield < kYields; ++yield) {
    if (all_here()) {
      return;
    }
    sched_yield();
  }
  const auto start = Clock::now();
  while (!all_here()) {
    sleep(missing, kSlice);
    pump_messages();
    if (!all_here()) {
      throw_if_failed();
      watch_peers(start);
    }
  }
}

// Inside of a collective, which fails when a message cannot go on.
void ShmEngine::pump_messages() {
  try {
    const std::scoped_lock lock(messages_mutex_);
    messages_.pump();
  } catch (const std::exception& error) {
    fail(FailureKind::kPeer, error.what());
  }
}

// With the messages' mutex held.
void ShmEngine::pump_messages_for(bool outgoing) {
  try {
    messages_.pump();
  } catch (const std::exception& error) {
    fail_message(outgoing, FailureKind::kPeer, error.what());
  }
}

void ShmEngine::sleep(int64_t missing, std::chrono::microseconds limit) {
  ShmMember& self = window_->member(rank_);
  const uint32_t seen = self.doorbell.load(std::memory_order_seq_cst);
  self.sleeping.fetch_add(1, std::memory_order_seq_cst);
  if (!has_arrived(missing)) {
    futex_wait(self.doorbell, seen, limit);
  }
  self.sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

bool ShmEngine::has_arrived(int64_t rank) const {
  return at_or_past(
      window_->member(rank).arrived.load(std::memory_order_seq_cst), step_);
}

ShmTransferPtr ShmEngine::start_send(
    const at::Tensor& tensor, int64_t peer, int tag) {
  throw_if_dead(/*outgoing=*/true);
  const std::scoped_lock lock(messages_mutex_);
  auto transfer = messages_.send(tensor, peer, tag);
  pump_messages_for(/*outgoing=*/true);
  return transfer;
}

ShmTransferPtr ShmEngine::start_recv(
    const at::Tensor& tensor, int64_t peer, int tag) {
  throw_if_dead(/*outgoing=*/false);
  const std::scoped_lock lock(messages_mutex_);
  auto transfer = messages_.recv(tensor, peer, tag);
  pump_messages_for(/*outgoing=*/false);
  return transfer;
}

bool ShmEngine::poll(const ShmTransfer& transfer) {
  return advance(transfer).done;
}

ShmEngine::Progress ShmEngine::advance(const ShmTransfer& transfer) {
  const std::scoped_lock lock(messages_mutex_);
  if (!transfer.done) {
    pump_messages_for(transfer.outgoing);
    if (!transfer.done) {
      throw_if_dead(transfer.outgoing);
    }
  }
  if (!transfer.mismatch.empty()) {
    fail_message(transfer.outgoing, FailureKind::kPeer, transfer.mismatch);
  }
  return {transfer.done, transfer.moved};
}

void ShmEngine::finish(const ShmTransfer& transfer) {
  ShmMember& self = window_->member(rank_);
  auto start = Clock::now();
  uint64_t moved = 0;
  while (true) {
    const uint32_t seen = self.doorbell.load(std::memory_order_seq_cst);
    const Progress progress = advance(transfer);
    if (progress.done) {
      return;
    }
    if (progress.moved != moved) { // the timeout counts from the last progress
      moved = progress.moved;
      start = Clock::now();
    }
    watch_message_peer(transfer, start);
    self.sleeping.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(self.doorbell, seen, kSlice);
    self.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }
}

} // namespace tessera
