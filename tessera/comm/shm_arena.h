// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <tessera/comm/shared_memory.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace tessera {

// Where a range of this process's memory lies for other processes.
struct SharedRange {
  MemoryAddress memory;
  uint64_t offset = 0;
};

// The memory of this process that its peers can read and write in place.
// Tensors of Group::allocate and of c10d's allocateTensor lie here. It grows by
// reserving address space in large pieces; a block's pages are taken when it is
// allocated. Freed blocks are kept for the next, up to as much as is in use and
// a little more; what goes beyond returns to the system. Thread-safe. A
// process that forks leaves the memory to its parent: what the child allocates
// lies apart, and what it frees stays.
class ShmArena : public c10::Allocator {
 public:
  static ShmArena& instance(); // lives as long as the process

  // Page-aligned, zero or what was there before. Throws IoError.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  c10::DeleterFnPtr raw_deleter() const override;

  // The range's place, when all of it lies in one block of the arena.
  std::optional<SharedRange> find(const void* data, std::size_t bytes) const;

  struct Usage {
    std::size_t used; // bytes in blocks that are allocated
    std::size_t kept; // bytes of freed blocks whose pages are still here
  };
  Usage usage() const;

 private:
  struct Segment {
    std::shared_ptr<SharedMemory> memory;
    std::map<std::size_t, std::size_t> free_blocks; // offset -> bytes
    std::map<std::size_t, std::size_t> used_blocks;
  };
  struct Block {
    std::size_t segment;
    std::size_t offset;
  };

  std::optional<Block> take(std::size_t bytes);
  static bool is_own(const Segment& segment);
  static void add_free(Segment& segment, std::size_t begin, std::size_t bytes);
  void give_back(void* data);
  const Segment* segment_of(const void* data) const;

  mutable std::shared_mutex mutex_;
  std::vector<Segment> segments_;
  Usage usage_{0, 0};
};

// An uninitialised, contiguous tensor in the arena. Throws UsageError for
// options of another device, IoError.
at::Tensor shm_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

} // namespace tessera
