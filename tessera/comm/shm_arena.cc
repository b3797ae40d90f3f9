// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <c10/util/safe_numerics.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/shm_arena.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSegmentBytes = std::size_t{1} << 30; // of address space
constexpr std::size_t kAlwaysKept = std::size_t{256} << 20;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

} // namespace

ShmArena& ShmArena::instance() {
  static auto* arena = new ShmArena; // tensors may outlive every static object
  return *arena;
}

c10::DataPtr ShmArena::allocate(std::size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) {
    return {nullptr, cpu};
  }
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw IoError(fmt::format("shared memory: no room for {} bytes", bytes));
  }
  const std::size_t rounded = round_up(bytes, kPage);
  const std::unique_lock lock(mutex_);
  auto block = take(rounded);
  if (!block) {
    Segment segment;
    const std::size_t size = std::max(kSegmentBytes, rounded);
    segment.memory = SharedMemory::create(size);
    segment.free_blocks.emplace(0, size);
    segments_.push_back(std::move(segment));
    block = take(rounded);
  }
  Segment& segment = segments_.at(block->segment);
  try {
    segment.memory->commit(block->offset, rounded);
  } catch (...) {
    segment.memory->release(block->offset, rounded); // what it could have
    add_free(segment, block->offset, rounded);
    throw;
  }
  std::byte* data = segment.memory->data() + block->offset;
  segment.used_blocks.emplace(block->offset, rounded);
  usage_.used += rounded;
  usage_.kept -= std::min(usage_.kept, rounded);
  return {data, data, raw_deleter(), cpu};
}

// A process that forked holds copies of its parent's books. The memory they
// tell of is still the parent's.
bool ShmArena::is_own(const Segment& segment) {
  return segment.memory->address().pid == getpid();
}

// The smallest free block that is large enough, of all segments.
std::optional<ShmArena::Block> ShmArena::take(std::size_t bytes) {
  std::optional<Block> best;
  std::size_t best_bytes = 0;
  for (std::size_t index = 0; index < segments_.size(); ++index) {
    if (!is_own(segments_[index])) {
      continue;
    }
    for (const auto& [offset, length] : segments_[index].free_blocks) {
      if (length >= bytes && (!best || length < best_bytes)) {
        best = Block{index, offset};
        best_bytes = length;
      }
    }
  }
  if (best) {
    auto& free_blocks = segments_[best->segment].free_blocks;
    free_blocks.erase(best->offset);
    if (best_bytes > bytes) {
      free_blocks.emplace(best->offset + bytes, best_bytes - bytes);
    }
  }
  return best;
}

void ShmArena::give_back(void* data) {
  const std::unique_lock lock(mutex_);
  auto* segment = const_cast<Segment*>(segment_of(data));
  if (!is_own(*segment)) {
    return;
  }
  const auto offset = static_cast<std::size_t>(
      static_cast<std::byte*>(data) - segment->memory->data());
  const auto used = segment->used_blocks.find(offset);
  const std::size_t bytes = used->second;
  usage_.used -= bytes;
  segment->used_blocks.erase(used);
  if (usage_.kept + bytes > usage_.used + kAlwaysKept) {
    segment->memory->release(offset, bytes);
  } else {
    usage_.kept += bytes;
  }
  add_free(*segment, offset, bytes);
}

// Free blocks that touch become one.
void ShmArena::add_free(
    Segment& segment, std::size_t begin, std::size_t bytes) {
  auto next = segment.free_blocks.lower_bound(begin);
  if (next != segment.free_blocks.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = segment.free_blocks.erase(next);
  }
  if (next != segment.free_blocks.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      segment.free_blocks.erase(previous);
    }
  }
  segment.free_blocks.emplace(begin, bytes);
}

const ShmArena::Segment* ShmArena::segment_of(const void* data) const {
  const auto* address = static_cast<const std::byte*>(data);
  for (const Segment& segment : segments_) {
    const std::byte* begin = segment.memory->data();
    if (address >= begin && address < begin + segment.memory->address().bytes) {
      return &segment;
    }
  }
  return nullptr;
}

c10::DeleterFnPtr ShmArena::raw_deleter() const {
  return [](void* data) { instance().give_back(data); };
}

void ShmArena::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

std::optional<SharedRange> ShmArena::find(
    const void* data, std::size_t bytes) const {
  const std::shared_lock lock(mutex_);
  const Segment* segment = segment_of(data);
  if (segment == nullptr || !is_own(*segment)) {
    return std::nullopt;
  }
  const auto offset = static_cast<std::size_t>(
      static_cast<const std::byte*>(data) - segment->memory->data());
  const auto after = segment->used_blocks.upper_bound(offset);
  if (after == segment->used_blocks.begin()) {
    return std::nullopt;
  }
  const auto block = std::prev(after);
  if (offset + bytes > block->first + block->second) {
    return std::nullopt;
  }
  return SharedRange{segment->memory->address(), offset};
}

at::Tensor shm_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    throw UsageError(
        "allocate: shared memory lies on the CPU, got device " +
        options.device().str());
  }
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t extent : sizes) {
    if (extent < 0 ||
        c10::mul_overflows(bytes, static_cast<uint64_t>(extent), &bytes)) {
      throw UsageError(fmt::format(
          "allocate: got shape {}, which no memory holds; expected extents "
          "from 0 whose product fits",
          bracketed(sizes)));
    }
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t{},
      bytes,
      ShmArena::instance().allocate(bytes),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  return at::empty({0}, options.device(at::kCPU)).set_(storage, 0, sizes, {});
}

ShmArena::Usage ShmArena::usage() const {
  const std::shared_lock lock(mutex_);
  return usage_;
}

} // namespace tessera
