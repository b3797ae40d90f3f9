// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/call_header.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

constexpr std::size_t kCacheLine = 64;

enum class MemberState : uint32_t { kAbsent, kPresent, kLeft };
enum class FailureState : uint32_t { kNone, kBeingWritten, kPublished };
enum class FailureKind : uint32_t { kPeer, kTimeout };

// What all ranks of the window write.
struct ShmControl {
  alignas(kCacheLine)
      std::atomic<uint32_t> arrivals; // of all ranks at all steps, modulo 2^32
  alignas(kCacheLine) std::atomic<uint32_t> step; // the last step at which all
                                                  // ranks have arrived
  std::atomic<uint32_t> sleepers; // on `step`
  alignas(kCacheLine) std::atomic<FailureState> failure;
  FailureKind failure_kind;
  std::array<char, 1500> failure_text;
};

// What one rank writes and the others read.
struct ShmMember {
  alignas(kCacheLine) std::atomic<uint32_t> arrived; // the last step at which
                                                     // this rank has arrived
  std::atomic<MemberState> state;
  int32_t pid;
  std::array<char, 64> host;
  // Sleeping place of a rank that waits for messages: bumped by peers that
  // wrote or read one.
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
  // returns when all have. The memory has no name in any file system: peers
  // reach it through /proc/<pid>/fd as the same user, and it goes with the last
  // of them, however they end. Threads of one process share one mapping. Throws
  // TimeoutError, IoError.
  static std::shared_ptr<ShmWindow> open(
      const c10::intrusive_ptr<c10d::Store>& store,
      int64_t rank,
      int64_t size,
      std::chrono::milliseconds timeout);
  ~ShmWindow();
  ShmWindow(const ShmWindow&) = delete;
  ShmWindow& operator=(const ShmWindow&) = delete;

  static constexpr std::size_t kChunkBytes = std::size_t{256}
      << 10; // one buffer of one rank
  static constexpr std::size_t kChannelBytes = std::size_t{64}
      << 10; // one ring

  int64_t size() const {
    return size_;
  }
  ShmControl& control() const;
  ShmMember& member(int64_t rank) const;
  // Calls alternate between two headers, steps between two buffers: `parity` is
  // the sequence number's or the step's.
  CallHeader& header(int64_t rank, uint64_t parity) const;
  int64_t* counts(int64_t rank, uint64_t parity) const; // 2 * size()
  std::byte* input(int64_t rank, uint64_t parity) const; // what the rank gives
  std::byte* result(
      int64_t rank, uint64_t parity) const; // what the rank has reduced
  ShmChannel& channel(int64_t from, int64_t to) const;
  std::byte* ring(int64_t from, int64_t to) const;

 private:
  ShmWindow(int fd, int64_t size);
  static std::size_t bytes_for(int64_t size);
  static std::shared_ptr<ShmWindow> create(int64_t size, std::string& path);
  static std::shared_ptr<ShmWindow> attach(
      const std::string& path, int64_t size);
  std::byte* at(std::size_t offset) const {
    return base_ + offset;
  }

  int64_t size_;
  std::byte* base_ = nullptr;
};

} // namespace tessera
