// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/shm_futex.h>
#include <tessera/comm/shm_messages.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

constexpr uint64_t kCapacity = ShmWindow::kChannelBytes;

void write_ring(
    std::byte* ring, uint64_t position, const std::byte* data, uint64_t bytes) {
  const uint64_t offset = position % kCapacity;
  const uint64_t first = std::min(bytes, kCapacity - offset);
  std::memcpy(ring + offset, data, first);
  std::memcpy(ring, data + first, bytes - first);
}

void read_ring(
    const std::byte* ring, uint64_t position, std::byte* data, uint64_t bytes) {
  const uint64_t offset = position % kCapacity;
  const uint64_t first = std::min(bytes, kCapacity - offset);
  std::memcpy(data, ring + offset, first);
  std::memcpy(data + first, ring, bytes - first);
}

} // namespace

std::string ShmTransfer::text() const {
  return fmt::format(
      "of {} {}",
      c10::toString(tensor.scalar_type()),
      bracketed(tensor.sizes()));
}

ShmMessages::ShmMessages(const ShmWindow& window, int64_t rank)
    : window_(window),
      rank_(rank),
      peers_(static_cast<std::size_t>(window.size())) {}

ShmTransferPtr ShmMessages::send(
    const at::Tensor& tensor, int64_t peer, int tag) {
  auto transfer = std::make_shared<ShmTransfer>(ShmTransfer{
      .outgoing = true,
      .tensor = tensor,
      .peer = peer,
      .tag = tag,
      .mismatch = {}});
  peers_[static_cast<std::size_t>(peer)].sends.push_back(transfer);
  ++pending_;
  return transfer;
}

ShmTransferPtr ShmMessages::recv(
    const at::Tensor& tensor, int64_t peer, int tag) {
  auto transfer = std::make_shared<ShmTransfer>(ShmTransfer{
      .outgoing = false,
      .tensor = tensor,
      .peer = peer,
      .tag = tag,
      .mismatch = {}});
  ++pending_;
  if (!match_kept(peer, transfer)) {
    peers_[static_cast<std::size_t>(peer)].receives.push_back(transfer);
  }
  return transfer;
}

void ShmMessages::complete(const ShmTransferPtr& transfer) {
  transfer->done = true;
  --pending_;
}

void ShmMessages::ring_doorbell(int64_t peer) {
  ShmMember& member = window_.member(peer);
  member.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (member.sleeping.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(member.doorbell);
  }
}

void ShmMessages::pump() {
  if (pending_ == 0) {
    return;
  }
  for (int64_t peer = 0; peer < window_.size(); ++peer) {
    const bool pushed = push(peer);
    const bool pulled = pull(peer);
    if (pushed || pulled) {
      ring_doorbell(peer);
    }
  }
}

// How much of a ring is full. One of its ends is the peer's word.
uint64_t ShmMessages::bytes_in(int64_t from, int64_t to) const {
  const ShmChannel& channel = window_.channel(from, to);
  const uint64_t bytes = channel.written.load(std::memory_order_acquire) -
      channel.read.load(std::memory_order_acquire);
  if (bytes > kCapacity) {
    throw CorruptionError(fmt::format(
        "messages from rank {} to rank {}: {} bytes in a ring of {}; do all "
        "ranks run the same build?",
        from,
        to,
        bytes,
        kCapacity));
  }
  return bytes;
}

// Writes what fits of the sends to `peer`. Returns whether anything moved.
bool ShmMessages::push(int64_t peer) {
  auto& sends = peers_[static_cast<std::size_t>(peer)].sends;
  ShmChannel& channel = window_.channel(rank_, peer);
  std::byte* ring = window_.ring(rank_, peer);
  bool any = false;
  while (!sends.empty()) {
    ShmTransfer& transfer = *sends.front();
    uint64_t written = channel.written.load(std::memory_order_relaxed);
    uint64_t space = kCapacity - bytes_in(rank_, peer);
    const Header header{
        transfer.tensor.nbytes(),
        static_cast<int64_t>(transfer.tensor.scalar_type()),
        transfer.tag};
    if (transfer.moved == 0) {
      if (space < sizeof(Header)) {
        return any;
      }
      write_ring(
          ring,
          written,
          reinterpret_cast<const std::byte*>(&header),
          sizeof(Header));
      written += sizeof(Header);
      space -= sizeof(Header);
      transfer.moved = sizeof(Header);
    }
    const uint64_t done = transfer.moved - sizeof(Header);
    const uint64_t bytes = std::min(space, header.bytes - done);
    if (bytes > 0) {
      write_ring(
          ring,
          written,
          static_cast<const std::byte*>(transfer.tensor.const_data_ptr()) +
              done,
          bytes);
    }
    transfer.moved += bytes;
    channel.written.store(written + bytes, std::memory_order_release);
    any = true;
    if (done + bytes < header.bytes) {
      return any;
    }
    complete(sends.front());
    sends.pop_front();
  }
  return any;
}

// Reads the next message's header, if there is one and somebody wants it or
// what is behind it. Returns whether it did.
bool ShmMessages::open_message(int64_t peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  ShmChannel& channel = window_.channel(peer, rank_);
  const uint64_t read = channel.read.load(std::memory_order_relaxed);
  if (state.receives.empty() || bytes_in(peer, rank_) < sizeof(Header)) {
    return false;
  }
  read_ring(
      window_.ring(peer, rank_),
      read,
      reinterpret_cast<std::byte*>(&state.header),
      sizeof(Header));
  state.done = 0;
  state.target = nullptr;
  const auto wanted = std::ranges::find_if(
      state.receives,
      [&](const auto& receive) { return receive->tag == state.header.tag; });
  if (wanted == state.receives.end()) {
    state.kept.push_back({state.header, {}});
  }
  channel.read.store(read + sizeof(Header), std::memory_order_release);
  state.inside = true;
  if (wanted == state.receives.end()) {
    return true;
  }
  state.target = *wanted;
  state.receives.erase(wanted);
  if (check(*state.target, state.header)) {
    complete(state.target);
  }
  return true;
}

// Reads what has arrived from `peer`. Returns whether anything moved.
bool ShmMessages::pull(int64_t peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  ShmChannel& channel = window_.channel(peer, rank_);
  bool any = false;
  while (state.inside || open_message(peer)) {
    if (state.target && !state.target->mismatch.empty()) {
      return any; // the group dies of it
    }
    const uint64_t read = channel.read.load(std::memory_order_relaxed);
    const uint64_t bytes =
        std::min(bytes_in(peer, rank_), state.header.bytes - state.done);
    if (bytes > 0) {
      std::byte* data = nullptr;
      if (state.target) {
        data = static_cast<std::byte*>(state.target->tensor.mutable_data_ptr());
      } else {
        state.kept.back().data.resize(state.done + bytes);
        data = state.kept.back().data.data();
      }
      read_ring(window_.ring(peer, rank_), read, data + state.done, bytes);
      channel.read.store(read + bytes, std::memory_order_release);
      state.done += bytes;
      any = true;
      if (state.target) {
        state.target->moved += bytes;
      }
    }
    if (state.done < state.header.bytes) {
      return any;
    }
    state.inside = false;
    any = true;
    if (state.target) {
      complete(state.target);
      state.target = nullptr;
    } else {
      deliver_last_kept(peer);
    }
  }
  return any;
}

// Serves a receive from a message that came whole before it. Returns whether
// there was one.
bool ShmMessages::match_kept(int64_t peer, const ShmTransferPtr& transfer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  const bool last_still_arrives = state.inside && !state.target;
  const auto end = state.kept.end() - (last_still_arrives ? 1 : 0);
  const auto found =
      std::find_if(state.kept.begin(), end, [&](const Message& message) {
        return message.header.tag == transfer->tag;
      });
  if (found == end) {
    return false;
  }
  if (!check(*transfer, found->header) && found->header.bytes > 0) {
    std::memcpy(
        transfer->tensor.mutable_data_ptr(),
        found->data.data(),
        found->header.bytes);
  }
  state.kept.erase(found);
  complete(transfer);
  return true;
}

// The message kept last is whole now: a receive posted while it arrived gets
// it.
void ShmMessages::deliver_last_kept(int64_t peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  const int64_t tag = state.kept.back().header.tag;
  const auto wanted = std::ranges::find_if(
      state.receives, [&](const auto& receive) { return receive->tag == tag; });
  if (wanted != state.receives.end()) {
    const ShmTransferPtr transfer = *wanted;
    state.receives.erase(wanted);
    match_kept(peer, transfer);
  }
}

// Sets the transfer's mismatch when the message is not what it asked for.
// Returns whether that is so.
bool ShmMessages::check(ShmTransfer& transfer, const Header& header) const {
  if (transfer.tensor.nbytes() == header.bytes &&
      static_cast<int64_t>(transfer.tensor.scalar_type()) == header.dtype) {
    return false;
  }
  transfer.mismatch = fmt::format(
      "recv from rank {} {}, tag {}: {} bytes of {} arrived; shapes and dtypes "
      "must match",
      transfer.peer,
      transfer.text(),
      transfer.tag,
      header.bytes,
      c10::toString(static_cast<c10::ScalarType>(header.dtype)));
  return true;
}

} // namespace tessera
