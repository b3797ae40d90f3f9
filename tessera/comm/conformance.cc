// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <tessera/comm/conformance.h>

#include <functional>
#include <numeric>
#include <random>
#include <string>

namespace tessera::conformance {
namespace {

at::Tensor empty_in(
    const Group& group,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    Memory memory) {
  const at::TensorOptions here = options.device(group.device());
  switch (memory) {
    case Memory::kPlain:
      break;
    case Memory::kAllocated:
      return group.allocate(sizes, here);
    case Memory::kUnaligned: {
      const int64_t numel = c10::multiply_integers(sizes);
      return group.allocate({numel + 1}, here).narrow(0, 1, numel);
    }
  }
  return at::empty(sizes, here);
}

void expect_equal(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(got.cpu(), expected));
}

// NCCL chooses the order of a sum, and rounds in between to the dtype.
void expect_reduced(
    const Group& group, const at::Tensor& got, const at::Tensor& expected) {
  if (group.backend_name() != "nccl" ||
      !at::isFloatingType(expected.scalar_type())) {
    expect_equal(got, expected);
    return;
  }
  const double epsilon = expected.scalar_type() == at::kBFloat16 ? 0x1p-7
      : expected.scalar_type() == at::kHalf                      ? 0x1p-10
      : expected.scalar_type() == at::kFloat                     ? 0x1p-23
                                                                 : 0x1p-52;
  constexpr double kLargest = 16; // of what the ranks bring, reduced
  EXPECT_TRUE(at::allclose(
      got.cpu().to(at::kDouble),
      expected.to(at::kDouble),
      0,
      static_cast<double>(group.size()) * kLargest * epsilon));
}

at::Tensor placed(const Group& group, const at::Tensor& value, Memory memory) {
  const at::Tensor copy =
      empty_in(group, value.sizes(), value.options(), memory);
  copy.copy_(value);
  return copy;
}

// What rank `rank` brings: small numbers of both signs that differ by rank.
at::Tensor input_of(int64_t rank, int64_t numel, at::ScalarType dtype) {
  const at::Tensor base = at::arange(numel, at::kLong) * (rank + 3) % 11 -
      (dtype == at::kByte ? 0 : 4);
  if (dtype == at::kBool) {
    return base.gt(rank);
  }
  return at::isFloatingType(dtype) ? (base.to(at::kDouble) / 3).to(dtype)
                                   : base.to(dtype);
}

// The reduction of the inputs of `size` ranks from `first` on, in order, as
// reduce_kernels.h describes it.
at::Tensor reduced(
    int64_t size,
    int64_t numel,
    at::ScalarType dtype,
    ReduceOp op,
    int64_t first = 0) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  const auto wide = narrow                                 ? at::kFloat
      : op == ReduceOp::kAvg && !at::isFloatingType(dtype) ? at::kLong
                                                           : dtype;
  at::Tensor sum = input_of(first, numel, dtype).to(wide);
  for (int64_t rank = first + 1; rank < first + size; ++rank) {
    const at::Tensor next = input_of(rank, numel, dtype).to(wide);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        sum = dtype == at::kBool ? sum.logical_or(next) : sum + next;
        break;
      case ReduceOp::kMin:
        sum = at::minimum(sum, next);
        break;
      case ReduceOp::kMax:
        sum = at::maximum(sum, next);
        break;
      case ReduceOp::kProduct:
        sum = dtype == at::kBool ? sum.logical_and(next) : sum * next;
        break;
    }
  }
  if (op == ReduceOp::kAvg) {
    sum = at::isFloatingType(wide) ? sum / size : at::div(sum, size, "trunc");
  }
  return sum.to(dtype);
}

Counts even_counts(int64_t size, int64_t each) {
  return Counts(static_cast<std::size_t>(size), each);
}

// Uneven, with one empty part where there are more than two ranks.
Counts uneven_counts(int64_t size, int64_t scale) {
  Counts counts;
  for (int64_t rank = 0; rank < size; ++rank) {
    counts.push_back(rank == 2 ? 0 : scale * (rank + 1) + 1);
  }
  return counts;
}

int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t start_of(const Counts& counts, int64_t rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}

int64_t own(const Counts& counts, const Group& group) {
  return counts[static_cast<std::size_t>(group.rank())];
}

} // namespace

void check_reductions(
    const Group& group,
    int64_t numel,
    at::ScalarType dtype,
    ReduceOp op,
    Memory memory) {
  SCOPED_TRACE(
      testing::Message() << numel << " " << c10::toString(dtype) << " "
                         << name_of(op));
  const int64_t size = group.size();
  const at::Tensor all =
      placed(group, input_of(group.rank(), numel, dtype), memory);
  group.all_reduce(all, op)->wait();
  expect_reduced(group, all, reduced(size, numel, dtype, op));
  for (const Counts& counts :
       {even_counts(size, numel), uneven_counts(size, numel)}) {
    const at::Tensor in =
        placed(group, input_of(group.rank(), total(counts), dtype), memory);
    const at::Tensor out =
        empty_in(group, {own(counts, group)}, in.options(), memory);
    group.reduce_scatter(in, out, counts, op)->wait();
    const at::Tensor expected =
        reduced(size, total(counts), dtype, op)
            .narrow(0, start_of(counts, group.rank()), own(counts, group));
    expect_reduced(group, out, expected);
  }
}

void check_movements(
    const Group& group, int64_t numel, at::ScalarType dtype, Memory memory) {
  SCOPED_TRACE(testing::Message() << numel << " " << c10::toString(dtype));
  const int64_t size = group.size();
  for (const Counts& counts :
       {even_counts(size, numel), uneven_counts(size, numel)}) {
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < size; ++rank) {
      parts.push_back(
          input_of(rank, counts[static_cast<std::size_t>(rank)], dtype));
    }
    const at::Tensor in =
        placed(group, parts[static_cast<std::size_t>(group.rank())], memory);
    const at::Tensor out =
        empty_in(group, {total(counts)}, in.options(), memory);
    group.all_gather(in, out, counts)->wait();
    expect_equal(out, at::cat(parts));
  }
  for (int64_t root = 0; root < size; ++root) {
    const at::Tensor x =
        placed(group, input_of(group.rank(), numel, dtype), memory);
    group.broadcast(x, root)->wait();
    expect_equal(x, input_of(root, numel, dtype));
  }
}

// Each element is 10a + b.
void check_all_to_all(const Group& group, int64_t scale, Memory memory) {
  const auto count = [scale](int64_t from, int64_t to) {
    return (from + 2 * to) % 3 * scale;
  };
  Counts gives;
  Counts takes;
  std::vector<at::Tensor> given;
  std::vector<at::Tensor> expected;
  for (int64_t peer = 0; peer < group.size(); ++peer) {
    gives.push_back(count(group.rank(), peer));
    takes.push_back(count(peer, group.rank()));
    given.push_back(
        at::full({gives.back()}, 10 * group.rank() + peer, at::kInt));
    expected.push_back(
        at::full({takes.back()}, 10 * peer + group.rank(), at::kInt));
  }
  const at::Tensor in = placed(group, at::cat(given), memory);
  const at::Tensor out = empty_in(group, {total(takes)}, in.options(), memory);
  group.all_to_all(in, out, gives, takes)->wait();
  expect_equal(out, at::cat(expected));
}

void check_ring(const Group& group) {
  const int64_t size = group.size();
  const int64_t next = (group.rank() + 1) % size;
  const int64_t previous = (group.rank() + size - 1) % size;
  const auto floats = at::TensorOptions(at::kFloat).device(group.device());
  for (const int64_t numel : {0, 1, 1000, 500'000}) {
    const at::Tensor out = at::full({numel}, group.rank(), floats);
    const at::Tensor in = at::full({numel}, -1, floats);
    auto sent = group.send(out, next, 7); // all send first: nobody may block
    auto received = group.recv(in, previous, 7);
    received->wait();
    sent->wait();
    EXPECT_TRUE(in.eq(previous).all().item<bool>());
  }
}

namespace {

// Calls of random sequences. Everything that ranks must agree on comes
// from `shared_`, which runs alike on all; what is a rank's own from `own_`.
class Sequence {
 public:
  Sequence(const World& world, c10::DeviceType device) : world_(world) {
    Counts everyone(static_cast<std::size_t>(world.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    groups_.push_back(
        device == c10::kCPU ? world.group()
                            : world.new_group(everyone, "all", device));
    for (int64_t first = 1; first < world.size(); first += 2) {
      Counts ranks(static_cast<std::size_t>(world.size() - first));
      std::iota(ranks.begin(), ranks.end(), first);
      if (world.rank() >= first) {
        groups_.push_back(
            world.new_group(ranks, "from" + std::to_string(first), device));
      }
    }
  }

  void run(uint64_t seed, int64_t calls) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    shared_.seed(seed);
    own_.seed(seed * 1000 + static_cast<uint64_t>(world_.rank()));
    for (int64_t i = 0; i < calls; ++i) {
      issue();
      if (shared_() % 3 == 0) {
        finish();
      }
    }
    finish();
  }

 private:
  void issue() {
    const auto kind = static_cast<CollectiveKind>(shared_() % 5);
    const at::ScalarType dtype = kDtypes.at(shared_() % kDtypes.size());
    ReduceOp op = kOps.at(shared_() % kOps.size());
    if (dtype == at::kBool && op == ReduceOp::kAvg) {
      op = ReduceOp::kMax;
    }
    const int64_t numel = extent();
    const std::size_t chosen = shared_() % 3;
    const uint64_t root = shared_();
    if (chosen >= groups_.size()) {
      return; // a group without this rank
    }
    start(groups_[chosen], kind, dtype, op, numel, root);
  }

  int64_t extent() {
    constexpr std::array<uint64_t, 4> kLimits = {4, 300, 5000, 70'000};
    return static_cast<int64_t>(shared_() % kLimits.at(shared_() % 4));
  }

  // The world's ranks of a group begin at world rank size() - group.size().
  at::Tensor brought(
      const Group& group, int64_t rank, int64_t n, at::ScalarType d) const {
    return input_of(world_.size() - group.size() + rank, n, d);
  }

  at::Tensor place(const Group& group, const at::Tensor& value) {
    return placed(group, value, static_cast<Memory>(own_() % 3));
  }

  at::Tensor room(const Group& group, int64_t numel, at::ScalarType dtype) {
    return empty_in(
        group,
        {numel},
        at::TensorOptions(dtype),
        static_cast<Memory>(own_() % 3));
  }

  at::Tensor reduction(
      const Group& group, int64_t n, at::ScalarType dtype, ReduceOp op) const {
    return reduced(group.size(), n, dtype, op, world_.size() - group.size());
  }

  void start_all_to_all(
      const Group& group, at::ScalarType dtype, const Counts& counts);
  void start(
      const Group& group,
      CollectiveKind kind,
      at::ScalarType dtype,
      ReduceOp op,
      int64_t numel,
      uint64_t root);
  void expect(
      const Group& group,
      WorkPtr work,
      at::Tensor in,
      at::Tensor out,
      at::Tensor expected) {
    pending_.push_back(
        {group,
         std::move(work),
         std::move(in),
         std::move(out),
         std::move(expected)});
  }
  void finish() {
    for (const Pending& pending : pending_) {
      pending.work->wait();
      expect_reduced(pending.group, pending.out, pending.expected);
    }
    pending_.clear();
  }

  struct Pending {
    Group group;
    WorkPtr work;
    at::Tensor in;
    at::Tensor out;
    at::Tensor expected;
  };

  World world_;
  std::mt19937_64 shared_;
  std::mt19937_64 own_;
  std::vector<Group> groups_;
  std::vector<Pending> pending_;
};

// Rank r gives everybody counts[r].
void Sequence::start_all_to_all(
    const Group& group, at::ScalarType dtype, const Counts& counts) {
  const int64_t size = group.size();
  const auto own_count = counts[static_cast<std::size_t>(group.rank())];
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto count = counts[static_cast<std::size_t>(rank)];
    parts.push_back(brought(group, rank, count * size, dtype)
                        .narrow(0, group.rank() * count, count));
  }
  const auto in =
      place(group, brought(group, group.rank(), own_count * size, dtype));
  const auto out = room(group, total(counts), dtype);
  const Counts gives(static_cast<std::size_t>(size), own_count);
  expect(
      group, group.all_to_all(in, out, gives, counts), in, out, at::cat(parts));
}

void Sequence::start(
    const Group& group,
    CollectiveKind kind,
    at::ScalarType dtype,
    ReduceOp op,
    int64_t numel,
    uint64_t root) {
  const int64_t size = group.size();
  const Counts counts = uneven_counts(size, numel / size);
  const int64_t sum = total(counts);
  const auto own_count = counts[static_cast<std::size_t>(group.rank())];
  std::vector<at::Tensor> parts;
  switch (kind) {
    case CollectiveKind::kAllReduce: {
      const auto x = place(group, brought(group, group.rank(), numel, dtype));
      return expect(
          group,
          group.all_reduce(x, op),
          x,
          x,
          reduction(group, numel, dtype, op));
    }
    case CollectiveKind::kReduceScatter: {
      const auto in = place(group, brought(group, group.rank(), sum, dtype));
      const auto out = room(group, own_count, dtype);
      return expect(
          group,
          group.reduce_scatter(in, out, counts, op),
          in,
          out,
          reduction(group, sum, dtype, op)
              .narrow(0, start_of(counts, group.rank()), own_count));
    }
    case CollectiveKind::kAllGather: {
      for (int64_t rank = 0; rank < size; ++rank) {
        parts.push_back(brought(
            group, rank, counts[static_cast<std::size_t>(rank)], dtype));
      }
      const auto in =
          place(group, parts[static_cast<std::size_t>(group.rank())]);
      const auto out = room(group, sum, dtype);
      return expect(
          group, group.all_gather(in, out, counts), in, out, at::cat(parts));
    }
    case CollectiveKind::kAllToAll:
      return start_all_to_all(group, dtype, counts);
    default: {
      const auto from =
          static_cast<int64_t>(root % static_cast<uint64_t>(size));
      const auto x = place(group, brought(group, group.rank(), numel, dtype));
      return expect(
          group,
          group.broadcast(x, from),
          x,
          x,
          brought(group, from, numel, dtype));
    }
  }
}

} // namespace

void check_large(const Group& group) {
  const int64_t size = group.size();
  const int64_t numel = (int64_t{16} << 20) / size;
  const Counts counts = even_counts(size, numel);
  const auto memory =
      group.rank() % 2 == 0 ? Memory::kAllocated : Memory::kPlain;
  const auto filled = [&](int64_t n, int64_t value) {
    return empty_in(group, {n}, at::kFloat, memory).fill_(value);
  };
  const auto holds = [](const at::Tensor& tensor, int64_t value) {
    return tensor.eq(value).all().item<bool>();
  };
  const int64_t sum = size * (size + 1) / 2;
  const at::Tensor all = filled(numel * size, group.rank() + 1);
  const at::Tensor part = filled(numel, -1);
  group.reduce_scatter(all, part, counts, ReduceOp::kSum)->wait();
  EXPECT_TRUE(holds(part, sum));
  group.all_reduce(all, ReduceOp::kMax)->wait();
  EXPECT_TRUE(holds(all, size));
  part.fill_(group.rank());
  group.all_gather(part, all, counts)->wait();
  for (int64_t rank = 0; rank < size; ++rank) {
    EXPECT_TRUE(holds(all.narrow(0, rank * numel, numel), rank));
  }
  const at::Tensor swapped = filled(numel * size, -1);
  group.all_to_all(all, swapped, counts, counts)->wait();
  EXPECT_TRUE(holds(swapped, group.rank()));
  group.broadcast(all, size - 1)->wait();
  EXPECT_TRUE(holds(all.narrow(0, 0, numel), 0));
}

void check_random_sequences(
    const World& world,
    uint64_t first_seed,
    uint64_t count,
    c10::DeviceType device) {
  Sequence sequence(world, device);
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    sequence.run(seed, 8);
  }
}

} // namespace tessera::conformance
