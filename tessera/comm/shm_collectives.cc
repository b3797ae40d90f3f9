// SPDX-License-Identifier: Apache-2.0
// The data movement of each collective, as steps between two meetings.
// shm_backend.cc tells why a buffer may be written again when its parity comes
// round, and how ranks that lend their memory and ranks that stage go together.
#include <tessera/base/error.h>
#include <tessera/comm/counts.h>
#include <tessera/comm/reduce_kernels.h>
#include <tessera/comm/shm_engine.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kUnit = 64; // elements: parts begin at cache lines for every
                              // dtype but bool and bytes, which need no care
// Up to here a second meeting costs more than a copy through the window.
constexpr int64_t kStagedBytes = 4 << 10;
// all_reduce up to here: everyone reduces everything, for one meeting.
constexpr int64_t kWholeBytes = 16 << 10;
// Results from here on are written past the caches.
constexpr int64_t kStreamedBytes = 8 << 20;

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

// Elements of `count` that lie in [begin, begin + length).
int64_t clipped(int64_t count, int64_t begin, int64_t length) {
  return std::clamp<int64_t>(count - begin, 0, length);
}

int64_t largest_of(std::span<const int64_t> counts) {
  return *std::max_element(counts.begin(), counts.end());
}

// Elements of each of `parts` equal parts of one chunk buffer.
int64_t part_capacity(int64_t parts, int64_t element) {
  return static_cast<int64_t>(ShmWindow::kChunkBytes) / element / parts /
      kUnit * kUnit;
}

// What is worth lending of `tensor`, of which a call moves `bytes`.
at::Tensor lent(const at::Tensor& tensor, int64_t bytes) {
  return bytes > kStagedBytes ? tensor : at::Tensor();
}

Store store_for(int64_t bytes) {
  return bytes >= kStreamedBytes ? Store::kStreamed : Store::kCached;
}

} // namespace

class ShmEngine::TouchScope {
 public:
  explicit TouchScope(ShmEngine& engine)
      : flag_(engine.window_->member(engine.rank_).touching) {
    if (!engine.any_in_place_) {
      return;
    }
    // Either this rank sees the failure, or whoever fails waits for this rank.
    flag_.store(1, std::memory_order_seq_cst);
    engine.throw_if_failed();
  }
  ~TouchScope() {
    end();
  }
  TouchScope(const TouchScope&) = delete;
  TouchScope& operator=(const TouchScope&) = delete;
  void end() {
    flag_.store(0, std::memory_order_release);
  }

 private:
  std::atomic<uint32_t>& flag_;
};

// Moves the data of a call: `move` takes one piece of everybody's part to where
// it belongs, after `stage` has put this rank's share of it into the window. In
// place where all ranks lend: then one piece is all, and a last meeting tells
// that nobody reads any more. `longest` is the longest part, known to all after
// the first meeting.
void ShmEngine::in_pieces(
    int64_t capacity,
    c10::function_ref<int64_t(int64_t)> bytes_of,
    c10::function_ref<int64_t()> longest,
    c10::function_ref<void(const Piece&)> stage,
    c10::function_ref<void(const Piece&)> move) {
  Piece piece{0, capacity, next_step()};
  if (stages()) {
    stage(piece);
  }
  meet();
  find_places(bytes_of);
  const int64_t total = longest();
  TouchScope touch(*this);
  if (all_in_place_) {
    piece.length = total;
  }
  move(piece);
  for (piece.begin = piece.length; piece.begin < total;
       piece.begin += capacity) {
    piece.step = next_step();
    if (stages()) {
      stage(piece);
    }
    meet();
    move(piece);
  }
  touch.end();
  if (any_in_place_) {
    meet();
  }
  given_ = {};
}

void ShmEngine::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const std::scoped_lock lock(mutex_);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const bool whole = bytes <= kWholeBytes;
  announce(
      {.kind = CollectiveKind::kAllReduce,
       .dtype = tensor.scalar_type(),
       .op = op,
       .shape = tensor.sizes()},
      whole ? at::Tensor() : tensor);
  if (whole) {
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
  sources_.clear();
  for (int64_t rank = 0; rank < size_; ++rank) {
    sources_.push_back(
        rank == rank_ ? read_from(tensor) : window_->input(rank, step));
  }
  reduce_in_order(
      tensor.scalar_type(), op, sources_, write_to(tensor), tensor.numel());
}

// One rank's part of a piece of an all_reduce.
struct ShmEngine::Part {
  int64_t begin; // in the tensor
  int64_t count;
  int64_t offset; // in the staging buffer, in elements
};

// Reduces this rank's part into its own tensor, into those that are lent, and,
// where a rank stages, into the result buffer.
void ShmEngine::reduce_part(
    const at::Tensor& tensor, ReduceOp op, const Part& part, uint32_t step) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  sources_.clear();
  targets_.clear();
  for (int64_t rank = 0; rank < size_; ++rank) {
    std::byte* data = rank == rank_ ? write_to(tensor) : place(rank);
    sources_.push_back(
        data != nullptr ? data + part.begin * element
                        : window_->input(rank, step) + part.offset * element);
    if (data != nullptr) {
      targets_.push_back(data + part.begin * element);
    }
  }
  if (!all_in_place_) {
    targets_.push_back(window_->result(rank_, step));
  }
  reduce_in_order(tensor.scalar_type(), op, sources_, targets_, part.count);
}

// Each rank reduces its own part of each piece. Those who stage fetch the
// others' parts one step later.
void ShmEngine::all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  const int64_t capacity = part_capacity(size_, element);
  int64_t piece = capacity * size_; // elements of all parts of one piece
  const auto part_of = [&](int64_t begin, int64_t rank) {
    const int64_t count = std::min(piece, tensor.numel() - begin);
    const int64_t length = divide_up(divide_up(count, size_), kUnit) * kUnit;
    return Part{
        begin + rank * length,
        clipped(count, rank * length, length),
        rank * capacity};
  };
  const auto for_others = [&](int64_t begin, const auto& copy) {
    for (int64_t peer = 0; peer < size_ && stages(); ++peer) {
      const Part part = part_of(begin, peer);
      if (peer != rank_) {
        copy(
            write_to(tensor, part.begin),
            part.offset * element,
            peer,
            part.count * element);
      }
    }
  };
  const auto stage = [&](int64_t begin, uint32_t step) {
    for_others(begin, [&](auto* data, int64_t at, int64_t, int64_t bytes) {
      copy_bytes(window_->input(rank_, step) + at, data, bytes);
    });
  };
  stage(0, next_step());
  meet();
  find_places([&](int64_t) { return tensor.numel() * element; });
  TouchScope touch(*this);
  if (all_in_place_) {
    piece = tensor.numel();
  }
  for (int64_t begin = 0; begin < tensor.numel(); begin += piece) {
    const uint32_t step = step_;
    reduce_part(tensor, op, part_of(begin, rank_), step);
    const int64_t next = begin + piece;
    if (next < tensor.numel()) {
      stage(next, next_step());
    } else {
      touch.end();
    }
    meet();
    for_others(begin, [&](auto* data, int64_t, int64_t peer, int64_t bytes) {
      copy_bytes(data, window_->result(peer, step), bytes);
    });
  }
  given_ = {};
}

void ShmEngine::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) {
  const std::scoped_lock lock(mutex_);
  const auto bytes = static_cast<int64_t>(in.nbytes());
  announce(
      {.kind = CollectiveKind::kReduceScatter,
       .dtype = in.scalar_type(),
       .op = op,
       .counts = counts},
      lent(in, bytes));
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(size_, element);
  const std::vector<int64_t> starts = starts_of(counts);
  const auto own = static_cast<std::size_t>(rank_);
  in_pieces(
      capacity,
      [&](int64_t) { return bytes; },
      [&] { return largest_of(counts); },
      [&](const Piece& piece) {
        for (std::size_t peer = 0; peer < counts.size(); ++peer) {
          if (peer != own) {
            copy_bytes(
                window_->input(rank_, piece.step) +
                    static_cast<int64_t>(peer) * capacity * element,
                read_from(in, starts[peer] + piece.begin),
                clipped(counts[peer], piece.begin, capacity) * element);
          }
        }
      },
      [&](const Piece& piece) {
        const int64_t first = (starts[own] + piece.begin) * element;
        sources_.clear();
        for (int64_t rank = 0; rank < size_; ++rank) {
          const std::byte* data = rank == rank_ ? read_from(in) : place(rank);
          sources_.push_back(
              data != nullptr ? data + first
                              : window_->input(rank, piece.step) +
                      rank_ * capacity * element);
        }
        targets_.assign(1, write_to(out, piece.begin));
        reduce_in_order(
            in.scalar_type(),
            op,
            sources_,
            targets_,
            clipped(counts[own], piece.begin, piece.length),
            store_for(static_cast<int64_t>(out.nbytes())));
      });
}

void ShmEngine::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) {
  const std::scoped_lock lock(mutex_);
  const auto bytes = static_cast<int64_t>(out.nbytes());
  announce(
      {.kind = CollectiveKind::kAllGather,
       .dtype = in.scalar_type(),
       .counts = counts},
      lent(in, bytes));
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(1, element);
  const std::vector<int64_t> starts = starts_of(counts);
  in_pieces(
      capacity,
      [&](int64_t rank) {
        return counts[static_cast<std::size_t>(rank)] * element;
      },
      [&] { return largest_of(counts); },
      [&](const Piece& piece) {
        copy_bytes(
            window_->input(rank_, piece.step),
            read_from(in, piece.begin),
            clipped(in.numel(), piece.begin, capacity) * element);
      },
      [&](const Piece& piece) {
        for (int64_t peer = 0; peer < size_; ++peer) {
          const auto index = static_cast<std::size_t>(peer);
          const std::byte* data = peer == rank_ ? read_from(in) : place(peer);
          copy_bytes(
              write_to(out, starts[index] + piece.begin),
              data != nullptr ? data + piece.begin * element
                              : window_->input(peer, piece.step),
              clipped(counts[index], piece.begin, piece.length) * element,
              store_for(bytes));
        }
      });
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
       .out_counts = out_counts},
      lent(in, static_cast<int64_t>(in.nbytes())));
  const auto element = static_cast<int64_t>(in.element_size());
  const int64_t capacity = part_capacity(size_, element);
  const std::vector<int64_t> in_starts = starts_of(in_counts);
  const std::vector<int64_t> out_starts = starts_of(out_counts);
  const auto own = static_cast<std::size_t>(rank_);
  const auto given_by = [&](int64_t rank) { // once the headers are here
    return std::span<const int64_t>(
        window_->counts(rank, seq_), static_cast<std::size_t>(size_));
  };
  in_pieces(
      capacity,
      [&](int64_t rank) { return sum_of(given_by(rank)) * element; },
      [&] {
        int64_t longest = 0;
        for (int64_t rank = 0; rank < size_; ++rank) {
          longest = std::max(longest, largest_of(given_by(rank)));
        }
        return longest;
      },
      [&](const Piece& piece) {
        for (std::size_t peer = 0; peer < in_counts.size(); ++peer) {
          if (peer != own) {
            copy_bytes(
                window_->input(rank_, piece.step) +
                    static_cast<int64_t>(peer) * capacity * element,
                read_from(in, in_starts[peer] + piece.begin),
                clipped(in_counts[peer], piece.begin, capacity) * element);
          }
        }
      },
      [&](const Piece& piece) {
        for (int64_t peer = 0; peer < size_; ++peer) {
          const auto index = static_cast<std::size_t>(peer);
          const std::byte* data = peer == rank_ ? read_from(in) : place(peer);
          const int64_t start = sum_of(given_by(peer).first(own));
          copy_bytes(
              write_to(out, out_starts[index] + piece.begin),
              data != nullptr ? data + (start + piece.begin) * element
                              : window_->input(peer, piece.step) +
                      rank_ * capacity * element,
              clipped(out_counts[index], piece.begin, piece.length) * element,
              store_for(static_cast<int64_t>(out.nbytes())));
        }
      });
}

void ShmEngine::broadcast(const at::Tensor& tensor, int64_t root) {
  const std::scoped_lock lock(mutex_);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  announce(
      {.kind = CollectiveKind::kBroadcast,
       .dtype = tensor.scalar_type(),
       .root = root,
       .shape = tensor.sizes()},
      rank_ == root ? lent(tensor, bytes) : at::Tensor());
  constexpr auto kCapacity = static_cast<int64_t>(ShmWindow::kChunkBytes);
  in_pieces(
      kCapacity,
      [&](int64_t rank) { return rank == root ? bytes : 0; },
      [&] { return bytes; },
      [&](const Piece& piece) {
        if (rank_ == root) {
          copy_bytes(
              window_->input(rank_, piece.step),
              read_from(tensor) + piece.begin,
              clipped(bytes, piece.begin, kCapacity));
        }
      },
      [&](const Piece& piece) {
        if (rank_ != root) {
          const std::byte* data = place(root);
          copy_bytes(
              write_to(tensor) + piece.begin,
              data != nullptr ? data + piece.begin
                              : window_->input(root, piece.step),
              clipped(bytes, piece.begin, piece.length),
              store_for(bytes));
        }
      });
}

void ShmEngine::barrier() {
  const std::scoped_lock lock(mutex_);
  announce(
      {.kind = CollectiveKind::kBarrier, .shape = at::IntArrayRef{}},
      at::Tensor());
  meet();
}

bool ShmEngine::can_lend(std::span<const at::Tensor> tensors) const {
  return std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.nbytes() == 0 || offer_for(tensor).reach != Reach::kStaged;
  });
}

void ShmEngine::with_peers(
    std::span<const at::Tensor> lent,
    const std::function<void(PeerBuffers)>& body) {
  const std::scoped_lock lock(mutex_);
  std::array<int64_t, kMaxLent> bytes{};
  std::ranges::transform(lent, bytes.begin(), [](const at::Tensor& tensor) {
    return static_cast<int64_t>(tensor.nbytes());
  });
  announce(
      {.kind = CollectiveKind::kWithPeers,
       .shape = at::IntArrayRef(bytes.data(), lent.size())},
      lent);
  meet();
  std::array<std::span<std::byte* const>, kMaxLent> buffers;
  for (std::size_t number = 0; number < lent.size(); ++number) {
    find_places([&](int64_t) { return bytes[number]; }, number);
    buffers[number] = places_[number];
  }
  if (!all_in_place_) { // as all ranks see
    given_ = {};
    throw UsageError(
        where(operation_) +
        ": a rank's memory is out of the others' reach; make the tensors with "
        "Group::allocate, and ask can_lend on every rank");
  }
  TouchScope touch(*this);
  try {
    body({buffers.data(), lent.size()});
  } catch (const std::exception& error) {
    publish(FailureKind::kPeer, where(operation_) + ": " + error.what());
    leave_no_reader();
    throw;
  }
  touch.end();
  meet();
  given_ = {};
}

} // namespace tessera
