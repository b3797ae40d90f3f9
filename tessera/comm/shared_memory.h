// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

// Where other processes find a shared memory. Plain bytes, so that it can
// travel through memory and stores.
struct MemoryAddress {
  int32_t pid = 0;
  int32_t fd = -1; // in that process
  uint64_t bytes = 0;
  uint64_t nonce = 0; // random, and part of the memory's name: tells whether
                      // the descriptor still means the same memory

  std::string text() const; // "17 4 4096 0x9f3c..."
  // Throws CorruptionError when `text` is none.
  static MemoryAddress parse(const std::string& text);
};

// Memory that several processes of one user have mapped. It has no name in any
// file system that outlives its makers: peers reach it through the descriptor
// of the process that made it, and it goes with the last that has it mapped,
// however they end. Its size never changes, so a peer that misbehaves cannot
// take pages away under a reader.
class SharedMemory {
 public:
  // `bytes` of address space; pages are taken by commit(), or at their first
  // use. Throws IoError that names the limit which stopped it.
  static std::shared_ptr<SharedMemory> create(std::size_t bytes);
  // Maps what another process made. The address may come from anywhere: size,
  // owner and name are checked. Throws IoError, CorruptionError.
  static std::shared_ptr<SharedMemory> attach(const MemoryAddress& address);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const {
    return data_;
  }
  const MemoryAddress& address() const {
    return address_;
  }
  // Takes the pages of this range now, zeroed where they are new. Throws
  // IoError when there is no room; without it the first use of a page that
  // cannot be had would kill the process.
  void commit(std::size_t offset, std::size_t bytes) const;
  // Gives the pages of this range back; they read as zero afterwards.
  void release(std::size_t offset, std::size_t bytes) const;
  // From now on no other process can map it. Only its maker calls this.
  void seal_off();

 private:
  SharedMemory(int fd, const MemoryAddress& address);

  MemoryAddress address_;
  int fd_;
  std::byte* data_ = nullptr;
};

} // namespace tessera
