// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/comm/collectives_bench.h>
#include <tessera/comm/world_impl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

double seconds_of(const Call& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A backend as it is measured: through c10d, or through the group where that
// does more than the backend that libtorch brings.
struct Subject {
  std::string name;
  c10::intrusive_ptr<c10d::Backend> backend; // null: through `group`
  Group group;
  bool allocates; // its buffers come from Group::allocate
};

// Each collective once, on buffers of one size.
struct Calls {
  Call all_reduce;
  Call reduce_scatter;
  Call all_gather;
  Call broadcast;
  Call all_to_all;
};

struct Buffers {
  at::Tensor whole;
  at::Tensor other; // as large
  at::Tensor part; // one rank's part
};

// Every call leaves numbers that the next can reduce again without overflow.
Calls through_c10d(
    const c10::intrusive_ptr<c10d::Backend>& backend, const Buffers& buffers) {
  c10d::AllreduceOptions maximum;
  maximum.reduceOp = c10d::ReduceOp::MAX;
  std::vector<at::Tensor> list{buffers.whole};
  std::vector<int64_t> even;
  Buffers own = buffers;
  return {
      .all_reduce =
          [backend, list, maximum]() mutable {
            backend->allreduce(list, maximum)->wait();
          },
      .reduce_scatter =
          [backend, own]() mutable {
            backend->_reduce_scatter_base(own.part, own.whole)->wait();
          },
      .all_gather =
          [backend, own]() mutable {
            backend->_allgather_base(own.other, own.part)->wait();
          },
      .broadcast = [backend,
                    list]() mutable { backend->broadcast(list)->wait(); },
      .all_to_all =
          [backend, own, even]() mutable {
            backend->alltoall_base(own.other, own.whole, even, even)->wait();
          }};
}

Calls through_group(const Group& group, const Buffers& buffers) {
  const std::vector<int64_t> counts(
      static_cast<std::size_t>(group.size()), buffers.part.numel());
  return {
      .all_reduce =
          [=] { group.all_reduce(buffers.whole, ReduceOp::kMax)->wait(); },
      .reduce_scatter =
          [=] {
            group
                .reduce_scatter(
                    buffers.whole, buffers.part, counts, ReduceOp::kSum)
                ->wait();
          },
      .all_gather =
          [=] {
            group.all_gather(buffers.part, buffers.other, counts)->wait();
          },
      .broadcast = [=] { group.broadcast(buffers.whole, 0)->wait(); },
      .all_to_all =
          [=] {
            group.all_to_all(buffers.whole, buffers.other, counts, counts)
                ->wait();
          }};
}

class Bench {
 public:
  Bench(const World& world, const CollectivesBenchOptions& options)
      : world_(world), options_(options), other_(gloo_beside(world)) {
    const std::string own = world.group().backend_name();
    const Group group = world.group();
    subjects_.push_back({own, group.backend(), group, true});
    if (own == "shm") {
      const Group gloo = other_.group();
      subjects_.push_back({"shm_plain", group.backend(), group, false});
      subjects_.push_back({"gloo", nullptr, gloo, false});
      subjects_.push_back({"c10d_gloo", gloo.backend(), gloo, false});
    }
  }

  std::vector<BenchRow> run() {
    memory();
    for (const int64_t bytes : options_.sizes) {
      for (const Subject& subject : subjects_) {
        measure(subject, bytes);
      }
    }
    return rows_;
  }

 private:
  static World gloo_beside(const World& world) {
    if (world.group().backend_name() != "shm") {
      return world;
    }
    WorldSetup setup = world.impl()->setup();
    setup.backend = "gloo";
    setup.store = c10::make_intrusive<c10d::PrefixStore>("gloo", setup.store);
    return World(std::make_shared<WorldImpl>(setup));
  }

  void meet() const {
    world_.group().barrier()->wait();
  }

  // The least of as many repetitions as fit; their number is rank 0's.
  double least_us(const Call& call) {
    meet();
    const double first = seconds_of(call);
    at::Tensor repetitions = at::empty({1}, at::kLong);
    repetitions.fill_(std::clamp<int64_t>(
        static_cast<int64_t>(options_.seconds / first), 7, 3000));
    world_.group().broadcast(repetitions, 0)->wait();
    double least = first;
    const int64_t count = repetitions.item<int64_t>();
    for (int64_t i = 0; i < count; ++i) {
      meet();
      least = std::min(least, seconds_of(call));
    }
    return least * 1e6;
  }

  void add(
      const std::string& name,
      double value,
      const std::string& unit,
      const std::string& against = "",
      double ratio = 0) {
    rows_.push_back({name, value, unit, against, ratio});
  }

  void memory();
  void measure(const Subject& subject, int64_t bytes);
  void of_triad(const std::string& collective, double us, int64_t moved);

  World world_;
  CollectivesBenchOptions options_;
  World other_;
  std::vector<Subject> subjects_;
  std::vector<BenchRow> rows_;
  double triad_ = 0; // GB/s of all ranks
};

// Each rank on 64 MiB of its own, all at once and rank 0 alone. As STREAM
// counts: what is read and written, once.
void Bench::memory() {
  constexpr int64_t kNumel = 16 << 20;
  const at::Tensor a = at::empty({kNumel}).fill_(1);
  const at::Tensor b = at::empty({kNumel}).fill_(2);
  const at::Tensor c = at::empty({kNumel}).fill_(3);
  float* const to = a.mutable_data_ptr<float>();
  const float* const left = b.const_data_ptr<float>();
  const float* const right = c.const_data_ptr<float>();
  const Call copy = [&] { std::memcpy(to, left, kNumel * sizeof(float)); };
  const Call triad = [&] {
    for (int64_t i = 0; i < kNumel; ++i) {
      to[i] = left[i] + 3.0F * right[i];
    }
  };
  const auto gigabytes_per_s = [&](const Call& call, int64_t arrays, bool all) {
    const double us = least_us(all || world_.rank() == 0 ? call : Call([] {}));
    const auto ranks = static_cast<double>(all ? world_.size() : 1);
    return static_cast<double>(arrays * kNumel) * sizeof(float) * ranks / us /
        1e3;
  };
  add("memory/memcpy/one core", gigabytes_per_s(copy, 2, false), "GB/s");
  add("memory/memcpy/all cores", gigabytes_per_s(copy, 2, true), "GB/s");
  add("memory/triad/one core", gigabytes_per_s(triad, 3, false), "GB/s");
  triad_ = gigabytes_per_s(triad, 3, true);
  add("memory/triad/all cores", triad_, "GB/s");
}

void Bench::of_triad(const std::string& collective, double us, int64_t moved) {
  const double speed = static_cast<double>(moved) / us / 1e3;
  add("shm/" + collective + "/64MiB/of triad",
      speed,
      "GB/s",
      "memory/triad/all cores",
      speed / triad_);
}

void Bench::measure(const Subject& subject, int64_t bytes) {
  const int64_t size = world_.size();
  const int64_t numel = bytes / 4 / size * size;
  const auto make = [&](int64_t count) {
    return (subject.allocates ? world_.group().allocate({count})
                              : at::empty({count}))
        .fill_(1);
  };
  const Buffers buffers{make(numel), make(numel), make(numel / size)};
  const Calls calls = subject.backend ? through_c10d(subject.backend, buffers)
                                      : through_group(subject.group, buffers);
  const std::string size_text = text_of_bytes(bytes);
  const auto row = [&](const char* collective, const Call& call) {
    const double us = least_us(call);
    add(fmt::format("{}/{}/{}", subject.name, collective, size_text), us, "us");
    return us;
  };
  row("all_reduce", calls.all_reduce);
  const double scatter = row("reduce_scatter", calls.reduce_scatter);
  const double gather = row("all_gather", calls.all_gather);
  row("broadcast", calls.broadcast);
  row("all_to_all", calls.all_to_all);
  if (subject.name == "shm" && bytes == 64 << 20) {
    of_triad("reduce_scatter", scatter, (size + 1) * bytes);
    of_triad("all_gather", gather, 2 * size * bytes);
  }
}

} // namespace

std::vector<BenchRow> run_collectives_bench(
    const World& world, const CollectivesBenchOptions& options) {
  return Bench(world, options).run();
}

std::string text_of_bytes(int64_t bytes) {
  return bytes >= (1 << 20) ? fmt::format("{}MiB", bytes >> 20)
                            : fmt::format("{}KiB", bytes >> 10);
}

} // namespace tessera
