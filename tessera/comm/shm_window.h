// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/call_header.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/shared_memory.h>
#include <tessera/comm/shm_arena.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace tessera {

constexpr std::size_t kCacheLine = 64;

enum class MemberState : uint32_t { kAbsent, kPresent, kLeft };
enum class FailureState : uint32_t { kNone, kBeingWritten, kPublished };
enum class FailureKind : uint32_t { kPeer, kTimeout };

// How the others reach what a rank gives to a call.
enum class Reach : uint32_t {
  kNothing, // it gives nothing
  kStaged, // it copies piece by piece into the window
  kAddress, // in place: all ranks are threads of one process
  kArena // in place: the memory is shared
};

struct ShmOffer {
  Reach reach = Reach::kNothing;
  std::byte* address = nullptr; // kAddress: in the process of all
  SharedRange range; // kArena
  uint64_t bytes = 0;
};

// What any rank may write.
struct ShmControl {
  alignas(kCacheLine) std::atomic<FailureState> failure;
  FailureKind failure_kind;
  std::array<char, 1500> failure_text;
};

// What one rank writes and the others read.
struct ShmMember {
  // The last step at which this rank has arrived, and what its calls look like
  // in one number each, by the parity of the call.
  alignas(kCacheLine) std::atomic<uint32_t> arrived;
  std::array<uint64_t, 2> fingerprints;
  // Its calls so far: the header of the last is the one to show when it dies.
  std::atomic<uint64_t> calls;
  // It reads or writes other ranks' memory in place right now.
  alignas(kCacheLine) std::atomic<uint32_t> touching;
  std::atomic<MemberState> state;
  int32_t pid;
  std::array<char, 64> host;
  // Its sleeping place: peers that arrive, or that wrote or read a message,
  // bump the doorbell when it sleeps.
  alignas(kCacheLine) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
};

// A stream of messages from one rank to another: a ring of bytes. Positions
// count bytes since the beginning.
struct ShmChannel {
  alignas(kCacheLine) std::atomic<uint64_t> written;
  alignas(kCacheLine) std::atomic<uint64_t> read;
};

// The memory that the ranks of one group share, and where things lie in it.
class ShmWindow {
 public:
  // Collective over the group: rank 0 makes the memory, the others map it;
  // returns when all have. Threads of one process share one mapping. Throws
  // TimeoutError, IoError, CorruptionError.
  static std::shared_ptr<ShmWindow> open(
      const c10::intrusive_ptr<c10d::Store>& store,
      int64_t rank,
      int64_t size,
      std::chrono::milliseconds timeout);

  static constexpr std::size_t kChunkBytes = std::size_t{256}
      << 10; // one buffer of one rank
  static constexpr std::size_t kChannelBytes = std::size_t{64}
      << 10; // one ring

  int64_t size() const {
    return static_cast<int64_t>(layout_.n);
  }
  ShmControl& control() const {
    return *std::launder(reinterpret_cast<ShmControl*>(at(0)));
  }
  ShmMember& member(int64_t rank) const {
    return *std::launder(
        reinterpret_cast<ShmMember*>(at(layout_.members)) + rank);
  }
  // Calls alternate between two headers and offers, steps between two buffers:
  // `parity` is the sequence number's or the step's.
  CallHeader& header(int64_t rank, uint64_t parity) const {
    return *std::launder(reinterpret_cast<CallHeader*>(
        at(layout_.headers + index(rank, parity) * layout_.header_bytes)));
  }
  int64_t* counts(int64_t rank, uint64_t parity) const { // 2 * size()
    return reinterpret_cast<int64_t*>(
        reinterpret_cast<std::byte*>(&header(rank, parity)) +
        sizeof(CallHeader));
  }
  ShmOffer& offer(int64_t rank, uint64_t parity, std::size_t number = 0) const {
    return *std::launder(
        reinterpret_cast<ShmOffer*>(at(layout_.offers)) +
        index(rank, parity) * kMaxLent + number);
  }
  // What the rank gives, and what it has reduced.
  std::byte* input(int64_t rank, uint64_t parity) const {
    return at(layout_.inputs + index(rank, parity) * kChunkBytes);
  }
  std::byte* result(int64_t rank, uint64_t parity) const {
    return at(layout_.results + index(rank, parity) * kChunkBytes);
  }
  ShmChannel& channel(int64_t from, int64_t to) const {
    return *std::launder(
        reinterpret_cast<ShmChannel*>(at(layout_.channels)) + from * size() +
        to);
  }
  std::byte* ring(int64_t from, int64_t to) const {
    return at(
        layout_.rings +
        static_cast<std::size_t>(from * size() + to) * kChannelBytes);
  }

 private:
  // Byte offsets of the parts.
  struct Layout {
    explicit Layout(int64_t size);

    std::size_t n;
    std::size_t header_bytes;
    std::size_t members;
    std::size_t headers;
    std::size_t offers;
    std::size_t channels;
    std::size_t rings;
    std::size_t inputs;
    std::size_t results;
    std::size_t total;
  };

  ShmWindow(std::shared_ptr<SharedMemory> memory, const Layout& layout)
      : memory_(std::move(memory)), layout_(layout) {}
  static std::shared_ptr<ShmWindow> create(const Layout& layout);
  static std::shared_ptr<ShmWindow> attach(
      const std::string& address, const Layout& layout);
  std::byte* at(std::size_t offset) const {
    return memory_->data() + offset;
  }
  std::size_t index(int64_t rank, uint64_t parity) const {
    return (parity % 2) * layout_.n + static_cast<std::size_t>(rank);
  }

  std::shared_ptr<SharedMemory> memory_;
  Layout layout_;
};

} // namespace tessera
