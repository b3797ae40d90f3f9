// SPDX-License-Identifier: Apache-2.0
// Every collective, dtype and operation, in sizes from nothing to a MiB and in
// uneven parts, against a plain model. The values are small whole numbers,
// whose sums and products are exact in every dtype, so that the order in which
// MPI combines them does not show.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_ranks.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

constexpr std::array kDtypes = {
    at::kFloat,
    at::kDouble,
    at::kBFloat16,
    at::kHalf,
    at::kByte,
    at::kChar,
    at::kShort,
    at::kInt,
    at::kLong,
    at::kBool};
constexpr std::array kOps = {
    ReduceOp::kSum,
    ReduceOp::kAvg,
    ReduceOp::kMin,
    ReduceOp::kMax,
    ReduceOp::kProduct};

int failed = 0;

std::size_t at_index(int64_t index) {
  return static_cast<std::size_t>(index);
}

// -3 to 3, or 0 to 3, by rank and place.
at::Tensor input_of(int64_t rank, int64_t numel, at::ScalarType dtype) {
  const at::Tensor mixed =
      (at::arange(numel, at::kLong) * (rank + 3) + rank) % 7;
  const at::Tensor small = dtype == at::kByte ? mixed % 4 : mixed - 3;
  return dtype == at::kBool ? mixed.gt(rank) : small.to(dtype);
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool booleans = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kProduct:
      return booleans ? a.logical_and(b) : a * b;
    default:
      return booleans ? a.logical_or(b) : a + b;
  }
}

at::Tensor reduced(
    int64_t size, int64_t numel, at::ScalarType dtype, ReduceOp op) {
  const bool average = op == ReduceOp::kAvg;
  const auto wide = !average             ? dtype
      : at::isIntegralType(dtype, false) ? at::kLong
                                         : at::kDouble;
  at::Tensor sum = input_of(0, numel, dtype).to(wide);
  for (int64_t rank = 1; rank < size; ++rank) {
    sum = combined(sum, input_of(rank, numel, dtype).to(wide), op);
  }
  if (average) {
    // The quotient of two small whole numbers, rounded once.
    sum = wide == at::kLong    ? at::div(sum, size, "trunc")
        : dtype == at::kDouble ? sum / size
                               : sum.to(at::kFloat) / size;
  }
  return sum.to(dtype);
}

Counts even_counts(int64_t size, int64_t each) {
  return Counts(at_index(size), each);
}

// One part is empty where there are more than two ranks.
Counts uneven_counts(int64_t size, int64_t scale) {
  Counts counts;
  for (int64_t rank = 0; rank < size; ++rank) {
    counts.push_back(rank == 2 ? 0 : scale * (rank + 1) / size + rank);
  }
  return counts;
}

int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t start_of(const Counts& counts, int64_t rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}

std::string title(
    const char* what,
    const World& world,
    int64_t numel,
    at::ScalarType dtype,
    const std::string& more = {}) {
  return fmt::format(
      "{} of {} {} {} on rank {}/{}",
      what,
      numel,
      c10::toString(dtype),
      more,
      world.rank(),
      world.size());
}

void check_reductions(
    const World& world, int64_t numel, at::ScalarType dtype, ReduceOp op) {
  const int64_t size = world.size();
  const std::string more(name_of(op));
  at::Tensor all = input_of(world.rank(), numel, dtype);
  world.group().all_reduce(all, op)->wait();
  expect(
      at::equal(all, reduced(size, numel, dtype, op)),
      title("all_reduce", world, numel, dtype, more));
  for (const Counts& counts :
       {even_counts(size, numel / size), uneven_counts(size, numel)}) {
    const at::Tensor in = input_of(world.rank(), total(counts), dtype);
    const int64_t own = counts[at_index(world.rank())];
    const at::Tensor out = at::empty({own}, in.options());
    world.group().reduce_scatter(in, out, counts, op)->wait();
    const at::Tensor expected = reduced(size, total(counts), dtype, op);
    expect(
        at::equal(out, expected.narrow(0, start_of(counts, world.rank()), own)),
        title("reduce_scatter", world, total(counts), dtype, more));
  }
}

void check_movements(const World& world, int64_t numel, at::ScalarType dtype) {
  const int64_t size = world.size();
  for (const Counts& counts :
       {even_counts(size, numel / size), uneven_counts(size, numel)}) {
    Tensors parts;
    for (int64_t rank = 0; rank < size; ++rank) {
      parts.push_back(input_of(rank, counts[at_index(rank)], dtype));
    }
    const at::Tensor out = at::empty({total(counts)}, parts[0].options());
    world.group()
        .all_gather(parts[at_index(world.rank())], out, counts)
        ->wait();
    expect(
        at::equal(out, at::cat(parts)),
        title("all_gather", world, total(counts), dtype));
  }
  for (int64_t root = 0; root < size; ++root) {
    const at::Tensor x = input_of(world.rank(), numel, dtype);
    world.group().broadcast(x, root)->wait();
    expect(
        at::equal(x, input_of(root, numel, dtype)),
        title("broadcast", world, numel, dtype));
  }
}

// Rank a gives rank b (a + 2b) % 3 * scale elements, each of them 10a + b.
void check_all_to_all(const World& world, int64_t scale) {
  const auto count = [scale](int64_t from, int64_t to) {
    return (from + 2 * to) % 3 * scale;
  };
  Counts gives;
  Counts takes;
  Tensors given;
  Tensors expected;
  for (int64_t peer = 0; peer < world.size(); ++peer) {
    gives.push_back(count(world.rank(), peer));
    takes.push_back(count(peer, world.rank()));
    given.push_back(
        at::full({gives.back()}, 10 * world.rank() + peer, at::kInt));
    expected.push_back(
        at::full({takes.back()}, 10 * peer + world.rank(), at::kInt));
  }
  const at::Tensor out = at::empty({total(takes)}, at::kInt);
  world.group().all_to_all(at::cat(given), out, gives, takes)->wait();
  expect(
      at::equal(out, at::cat(expected)),
      title("all_to_all", world, total(takes), at::kInt));
}

void check_messages(const World& world) {
  const int64_t size = world.size();
  const int64_t next = (world.rank() + 1) % size;
  const int64_t previous = (world.rank() + size - 1) % size;
  for (const int64_t numel : {0, 1, 1000, 200'000}) {
    const at::Tensor out = at::full({numel}, world.rank(), at::kFloat);
    const at::Tensor in = at::full({numel}, -1, at::kFloat);
    const WorkPtr sent = world.group().send(out, next, 7);
    world.group().recv(in, previous, 7)->wait();
    sent->wait();
    expect(
        in.eq(previous).all().item<bool>(),
        title("message", world, numel, at::kFloat));
  }
  Tensors received; // matched by tag, taken in the opposite order
  std::vector<WorkPtr> works;
  for (int tag = 0; tag < 5; ++tag) {
    works.push_back(world.group().send(at::full({500}, tag), next, tag));
    received.push_back(at::full({500}, -1));
    works.push_back(world.group().recv(received.back(), previous, 4 - tag));
  }
  for (const WorkPtr& work : works) {
    work->wait();
  }
  for (int tag = 0; tag < 5; ++tag) {
    expect(
        received[at_index(4 - tag)].eq(tag).all().item<bool>(),
        fmt::format("message of tag {}", tag));
  }
}

void check_not_a_number(const World& world) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const at::Tensor x = at::zeros({world.size()}, dtype);
      x[world.rank()] = std::numeric_limits<float>::quiet_NaN();
      world.group().all_reduce(x, op)->wait();
      expect(
          x.isnan().all().item<bool>(),
          title("NaN", world, world.size(), dtype, std::string(name_of(op))));
    }
  }
}

// An average whose sum float16 cannot hold.
void check_large_halves(const World& world) {
  const at::Tensor x = at::full({9}, 30'000, at::kHalf);
  world.group().all_reduce(x, ReduceOp::kAvg)->wait();
  expect(x.eq(30'000).all().item<bool>(), "average of large float16");
}

// In and out may be the same memory.
void check_aliases(const World& world) {
  const int64_t size = world.size();
  const Counts counts = even_counts(size, 100);
  const at::Tensor all = at::ones({100 * size});
  const at::Tensor own = all.narrow(0, 100 * world.rank(), 100);
  world.group().reduce_scatter(all, own, counts, ReduceOp::kSum)->wait();
  expect(own.eq(size).all().item<bool>(), "reduce_scatter into its input");
  world.group().all_gather(own, all, counts)->wait();
  expect(all.eq(size).all().item<bool>(), "all_gather from its output");
  const at::Tensor column = at::full({size}, world.rank(), at::kInt);
  const Counts ones = even_counts(size, 1);
  world.group().all_to_all(column, column, ones, ones)->wait();
  expect(at::equal(column, at::arange(size, at::kInt)), "all_to_all in place");
}

void check_many_in_flight(const World& world) {
  Tensors tensors;
  std::vector<WorkPtr> works;
  for (int64_t i = 0; i < 30; ++i) {
    tensors.push_back(at::full({3'000 + i}, i + world.rank(), at::kInt));
    works.push_back(world.group().all_reduce(tensors.back(), ReduceOp::kSum));
  }
  for (int64_t i = 29; i >= 0; --i) { // waiting in any order
    const WorkPtr& work = works[at_index(i)];
    if (i % 3 == 0) {
      while (!work->isCompleted()) {
      }
    } else {
      work->wait();
    }
    const int64_t n = world.size();
    expect(
        work->isSuccess() &&
            tensors[at_index(i)].eq(i * n + n * (n - 1) / 2).all().item<bool>(),
        fmt::format("collective {} of many in flight", i));
  }
}

void check_futures(const World& world) {
  const at::Tensor x = at::ones({50'000});
  const WorkPtr work = world.group().all_reduce(x, ReduceOp::kSum);
  const auto future = work->getFuture();
  future->wait();
  expect(
      !future->hasError() &&
          future->value()
              .toTensorVector()
              .at(0)
              .eq(world.size())
              .all()
              .item<bool>(),
      "future of an all_reduce");
}

void check_groups(const World& world) {
  const Counts everyone = [&] {
    Counts ranks(at_index(world.size()));
    std::iota(ranks.rbegin(), ranks.rend(), int64_t{0});
    return ranks;
  }();
  const Group reversed = world.new_group(everyone, "reversed");
  expect(reversed.rank() == world.size() - 1 - world.rank(), "rank in a group");
  Counts mine;
  for (int64_t rank = world.rank() % 2; rank < world.size(); rank += 2) {
    mine.push_back(rank);
  }
  const Group parity = world.new_group(mine, "parity");
  const at::Tensor a = at::full({1000}, world.rank(), at::kLong);
  const at::Tensor b = a.clone();
  const WorkPtr first = reversed.broadcast(a, 0);
  const WorkPtr second = parity.all_reduce(b, ReduceOp::kSum);
  second->wait();
  first->wait();
  expect(a.eq(world.size() - 1).all().item<bool>(), "broadcast in reverse");
  expect(b.eq(total(mine)).all().item<bool>(), "all_reduce by parity");
}

void check_c10d(const World& world) {
  const auto backend = world.group().backend();
  expect(backend->getBackendName() == "mpi", "name of the c10d backend");
  const int64_t n = world.size();
  Tensors tensors{at::ones({4})};
  backend->allreduce(tensors)->wait();
  std::vector<Tensors> outputs{Tensors()};
  for (int64_t rank = 0; rank < n; ++rank) {
    outputs[0].push_back(at::zeros({4}));
  }
  backend->allgather(outputs, tensors)->wait();
  expect(outputs[0].back().eq(n).all().item<bool>(), "c10d allgather");
  at::Tensor in = at::arange(2 * n, at::kFloat);
  at::Tensor out = at::zeros({2});
  backend->_reduce_scatter_base(out, in)->wait();
  expect(
      at::equal(out, in.narrow(0, 2 * world.rank(), 2) * n),
      "c10d _reduce_scatter_base");
  c10d::GatherOptions gather;
  gather.rootRank = n - 1;
  std::vector<Tensors> gathered;
  if (world.rank() == n - 1) {
    gathered = {outputs[0]};
  }
  Tensors own{at::full({4}, world.rank(), at::kFloat)};
  const WorkPtr work = backend->gather(gathered, own, gather);
  while (!work->isCompleted()) {
  }
  for (int64_t rank = 0; rank < n && world.rank() == n - 1; ++rank) {
    expect(
        outputs[0][at_index(rank)].eq(rank).all().item<bool>(), "c10d gather");
  }
}

// Ranks draw alike from one seed.
void check_random_sequence(const World& world) {
  std::mt19937_64 random(4711);
  const auto draw = [&random](uint64_t below) {
    return static_cast<int64_t>(random() % below);
  };
  for (int turn = 0; turn < 200; ++turn) {
    const auto dtype = kDtypes.at(at_index(draw(kDtypes.size())));
    const auto op = kOps.at(at_index(draw(kOps.size())));
    const int64_t numel = draw(2) == 0 ? draw(20) : draw(5'000);
    if (dtype == at::kBool && op == ReduceOp::kAvg) {
      check_movements(world, numel, dtype);
    } else if (draw(2) == 0) {
      check_reductions(world, numel, dtype, op);
    } else {
      check_all_to_all(world, numel);
    }
  }
}

} // namespace

void expect(bool holds, const std::string& what) {
  if (!holds) {
    ++failed;
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
  }
}

int failures() {
  return failed;
}

void check_everything(const World& world) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t numel : {0, 1, 7, 1'000}) {
      for (const ReduceOp op : kOps) {
        if (dtype != at::kBool || op != ReduceOp::kAvg) {
          check_reductions(world, numel, dtype, op);
        }
      }
      check_movements(world, numel, dtype);
    }
    check_reductions(world, 262'147, dtype, ReduceOp::kSum);
    check_movements(world, 262'147, dtype);
  }
  for (const int64_t scale : {0, 1, 5, 50'003}) {
    check_all_to_all(world, scale);
  }
  check_not_a_number(world);
  check_large_halves(world);
  check_random_sequence(world);
  world.group().barrier()->wait();
  if (world.size() > 1) {
    check_aliases(world);
    check_messages(world);
    check_many_in_flight(world);
    check_futures(world);
    check_groups(world);
    check_c10d(world);
  }
}

} // namespace tessera
