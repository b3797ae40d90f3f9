// SPDX-License-Identifier: Apache-2.0
// The data movement of each collective, as steps between two meetings.
// shm_backend.cc tells why a buffer may be written again when its parity comes
// round.
#include <tessera/comm/reduce_kernels.h>
#include <tessera/comm/shm_engine.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tessera {
namespace {

constexpr int64_t kUnit = 64; // elements: parts begin at cache lines for every
                              // dtype but bool and bytes, which need no care

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Where element `index` lies; an empty tensor may have no memory at all.
const std::byte* read_from(const at::Tensor& tensor, int64_t index = 0) {
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return data == nullptr
      ? nullptr
      : data + index * static_cast<int64_t>(tensor.element_size());
}

std::byte* write_to(const at::Tensor& tensor, int64_t index = 0) {
  auto* data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  return data == nullptr
      ? nullptr
      : data + index * static_cast<int64_t>(tensor.element_size());
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

// Elements of `count` that lie in [begin, begin + length).
int64_t clipped(int64_t count, int64_t begin, int64_t length) {
  return std::clamp<int64_t>(count - begin, 0, length);
}

std::vector<int64_t> starts_of(std::span<const int64_t> counts) {
  std::vector<int64_t> starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  return starts;
}

int64_t largest_of(std::span<const int64_t> counts) {
  return *std::max_element(counts.begin(), counts.end());
}

// Elements of each of `parts` equal parts of one chunk buffer.
int64_t part_capacity(int64_t parts, int64_t element) {
  return static_cast<int64_t>(ShmWindow::kChunkBytes) / element / parts /
      kUnit * kUnit;
}

} // namespace

void ShmEngine::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  constexpr int64_t kWholeBytes = 32
      << 10; // below this one meeting costs more than reducing everything
             // everywhere
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kAllReduce,
       .dtype = tensor.scalar_type(),
       .op = op,
       .shape = tensor.sizes()});
  if (static_cast<int64_t>(tensor.nbytes()) <= kWholeBytes) {
    all_reduce_whole(tensor, op);
  } else {
    all_reduce_by_parts(tensor, op);
  }
}

void ShmEngine::all_reduce_whole(const at::Tensor& tensor, ReduceOp op) {
  const uint32_t step = next_step();
  copy_bytes(
      window_->input(rank_, step),
      read_from(tensor),
      static_cast<int64_t>(tensor.nbytes()));
  meet();
  std::vector<const std::byte*> sources;
  for (int64_t rank = 0; rank < size_; ++rank) {
    sources.push_back(
        rank == rank_ ? read_from(tensor) : window_->input(rank, step));
  }
  reduce_in_order(
      tensor.scalar_type(), op, sources, write_to(tensor), tensor.numel());
}

// Each rank reduces its own part of each chunk and the others fetch it one step
// later.
void ShmEngine::all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  const int64_t capacity = part_capacity(size_, element);
  const int64_t steps = divide_up(tensor.numel(), capacity * size_);
  std::byte* data = write_to(tensor);
  std::vector<const std::byte*> sources(static_cast<std::size_t>(size_));
  struct Part {
    int64_t begin;
    int64_t count;
  };
  const auto part_of = [&](int64_t chunk, int64_t rank) {
    const int64_t chunk_begin = chunk * capacity * size_;
    const int64_t chunk_count =
        std::min(capacity * size_, tensor.numel() - chunk_begin);
    const int64_t length = std::min(
        capacity, divide_up(divide_up(chunk_count, size_), kUnit) * kUnit);
    return Part{
        chunk_begin + rank * length,
        clipped(chunk_count, rank * length, length)};
  };
  for (int64_t chunk = 0; chunk <= steps; ++chunk) {
    const uint32_t step = next_step();
    for (int64_t peer = 0; peer < size_ && chunk < steps; ++peer) {
      if (peer != rank_) {
        const Part part = part_of(chunk, peer);
        copy_bytes(
            window_->input(rank_, step) + peer * capacity * element,
            data + part.begin * element,
            part.count * element);
      }
    }
    meet();
    for (int64_t peer = 0; peer < size_ && chunk > 0; ++peer) {
      if (peer != rank_) {
        const Part part = part_of(chunk - 1, peer);
        copy_bytes(
            data + part.begin * element,
            window_->result(peer, step - 1),
            part.count * element);
      }
    }
    if (chunk < steps) {
      const Part own = part_of(chunk, rank_);
      for (int64_t rank = 0; rank < size_; ++rank) {
        sources[static_cast<std::size_t>(rank)] = rank == rank_
            ? data + own.begin * element
            : window_->input(rank, step) + rank_ * capacity * element;
      }
      std::byte* result = window_->result(rank_, step);
      reduce_in_order(tensor.scalar_type(), op, sources, result, own.count);
      copy_bytes(data + own.begin * element, result, own.count * element);
    }
  }
}

void ShmEngine::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) {
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kReduceScatter,
       .dtype = in.scalar_type(),
       .op = op,
       .counts = counts});
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(size_, element);
  const std::vector<int64_t> starts = starts_of(counts);
  const auto own = static_cast<std::size_t>(rank_);
  std::vector<const std::byte*> sources(counts.size());
  const int64_t steps =
      std::max<int64_t>(1, divide_up(largest_of(counts), capacity));
  for (int64_t begin = 0; begin < steps * capacity; begin += capacity) {
    const uint32_t step = next_step();
    for (std::size_t peer = 0; peer < counts.size(); ++peer) {
      if (peer != own) {
        copy_bytes(
            window_->input(rank_, step) +
                static_cast<int64_t>(peer) * capacity * element,
            read_from(in, starts[peer] + begin),
            clipped(counts[peer], begin, capacity) * element);
      }
    }
    meet();
    for (int64_t rank = 0; rank < size_; ++rank) {
      sources[static_cast<std::size_t>(rank)] = rank == rank_
          ? read_from(in, starts[own] + begin)
          : window_->input(rank, step) + rank_ * capacity * element;
    }
    const int64_t count = clipped(counts[own], begin, capacity);
    if (count > 0) {
      reduce_in_order(
          in.scalar_type(), op, sources, write_to(out, begin), count);
    }
  }
}

void ShmEngine::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) {
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kAllGather,
       .dtype = in.scalar_type(),
       .counts = counts});
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(1, element);
  const std::vector<int64_t> starts = starts_of(counts);
  const auto own = static_cast<std::size_t>(rank_);
  const int64_t steps =
      std::max<int64_t>(1, divide_up(largest_of(counts), capacity));
  for (int64_t begin = 0; begin < steps * capacity; begin += capacity) {
    const uint32_t step = next_step();
    const int64_t own_bytes = clipped(counts[own], begin, capacity) * element;
    copy_bytes(window_->input(rank_, step), read_from(in, begin), own_bytes);
    meet();
    for (std::size_t peer = 0; peer < counts.size(); ++peer) {
      const std::byte* source = peer == own
          ? read_from(in, begin)
          : window_->input(static_cast<int64_t>(peer), step);
      copy_bytes(
          write_to(out, starts[peer] + begin),
          source,
          clipped(counts[peer], begin, capacity) * element);
    }
  }
}

void ShmEngine::all_to_all(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> in_counts,
    std::span<const int64_t> out_counts) {
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kAllToAll,
       .dtype = in.scalar_type(),
       .counts = in_counts,
       .out_counts = out_counts});
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(size_, element);
  const std::vector<int64_t> in_starts = starts_of(in_counts);
  const std::vector<int64_t> out_starts = starts_of(out_counts);
  const auto own = static_cast<std::size_t>(rank_);
  int64_t longest = capacity; // of all pairs; known once the headers are here
  for (int64_t begin = 0; begin < longest; begin += capacity) {
    const uint32_t step = next_step();
    for (std::size_t peer = 0; peer < in_counts.size(); ++peer) {
      if (peer != own) {
        copy_bytes(
            window_->input(rank_, step) +
                static_cast<int64_t>(peer) * capacity * element,
            read_from(in, in_starts[peer] + begin),
            clipped(in_counts[peer], begin, capacity) * element);
      }
    }
    meet();
    for (std::size_t peer = 0; peer < out_counts.size(); ++peer) {
      const std::byte* source = peer == own
          ? read_from(in, in_starts[own] + begin)
          : window_->input(static_cast<int64_t>(peer), step) +
              rank_ * capacity * element;
      copy_bytes(
          write_to(out, out_starts[peer] + begin),
          source,
          clipped(out_counts[peer], begin, capacity) * element);
    }
    for (int64_t rank = 0; rank < size_ && begin == 0; ++rank) {
      longest = std::max(
          longest,
          largest_of(
              {window_->counts(rank, seq_), static_cast<std::size_t>(size_)}));
    }
  }
}

void ShmEngine::broadcast(const at::Tensor& tensor, int64_t root) {
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kBroadcast,
       .dtype = tensor.scalar_type(),
       .root = root,
       .shape = tensor.sizes()});
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  constexpr auto kCapacity = static_cast<int64_t>(ShmWindow::kChunkBytes);
  const int64_t steps = std::max<int64_t>(1, divide_up(bytes, kCapacity));
  for (int64_t begin = 0; begin < steps * kCapacity; begin += kCapacity) {
    const uint32_t step = next_step();
    const int64_t length = clipped(bytes, begin, kCapacity);
    if (rank_ == root) {
      copy_bytes(
          window_->input(rank_, step), read_from(tensor) + begin, length);
    }
    meet();
    if (rank_ != root) {
      copy_bytes(write_to(tensor) + begin, window_->input(root, step), length);
    }
  }
}

void ShmEngine::barrier() {
  const std::scoped_lock lock(mutex_);
  announce({.kind = CollectiveKind::kBarrier, .shape = at::IntArrayRef{}});
  meet();
}

} // namespace tessera
