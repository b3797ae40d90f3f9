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

// A backend as it is measured.
struct Subject {
  std::string name;
  c10::intrusive_ptr<c10d::Backend> backend;
  bool allocates; // its buffers come from Group::allocate
};

class Bench {
 public:
  Bench(const World& world, const CollectivesBenchOptions& options)
      : world_(world), options_(options), other_(gloo_beside(world)) {
    const std::string own = world.group().backend_name();
    const auto backend = world.group().backend();
    subjects_.push_back({own, backend, true});
    if (own == "shm") {
      subjects_.push_back({"shm_plain", backend, false});
      subjects_.push_back({"gloo", other_.group().backend(), false});
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
  std::vector<at::Tensor> whole{make(numel)};
  at::Tensor part = make(numel / size);
  at::Tensor other = make(numel);
  c10d::Backend& backend = *subject.backend;
  c10d::AllreduceOptions maximum;
  maximum.reduceOp = c10d::ReduceOp::MAX; // keeps the numbers as they are
  std::vector<int64_t> even;
  const std::string size_text = text_of_bytes(bytes);
  const auto row = [&](const char* collective, const Call& call) {
    const double us = least_us(call);
    add(fmt::format("{}/{}/{}", subject.name, collective, size_text), us, "us");
    return us;
  };
  row("all_reduce", [&] { backend.allreduce(whole, maximum)->wait(); });
  const double scatter = row("reduce_scatter", [&] {
    backend._reduce_scatter_base(part, whole[0])->wait();
  });
  const double gather =
      row("all_gather", [&] { backend._allgather_base(other, part)->wait(); });
  row("broadcast", [&] { backend.broadcast(whole)->wait(); });
  row("all_to_all",
      [&] { backend.alltoall_base(other, whole[0], even, even)->wait(); });
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
