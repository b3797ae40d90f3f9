// SPDX-License-Identifier: Apache-2.0
// What stands around the collectives, between two processes on one machine, in
// microseconds (fastest tenth of the repetitions): many in flight against one
// after another, the debug mode's comparison, the record of a call. `tessera
// bench collectives` measures the collectives themselves.
//   comm_bench [--json FILE] [--ranks N]
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <tessera/base/bench_row.h>
#include <tessera/base/environment.h>
#include <tessera/comm/collectives_bench.h>
#include <tessera/comm/launch.h>
#include <tessera/comm/record_bench.h>
#include <tessera/comm/world_impl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

constexpr std::array<int64_t, 5> kSizes = {
    4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};

double microseconds_of(const Call& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start)
      .count();
}

// The tenth percentile over repetitions whose number depends on the size alone,
// so that all ranks do the same.
double fast_us(int64_t bytes, const Call& before, const Call& call) {
  const int64_t repetitions =
      std::clamp<int64_t>((int64_t{256} << 20) / bytes, 7, 200);
  std::vector<double> times;
  for (int64_t i = 0; i < repetitions + 2; ++i) {
    before();
    times.push_back(microseconds_of(call));
  }
  times.erase(times.begin(), times.begin() + 2);
  std::nth_element(
      times.begin(),
      times.begin() + static_cast<std::ptrdiff_t>(times.size() / 10),
      times.end());
  return times[times.size() / 10];
}

class Bench {
 public:
  explicit Bench(const World& world)
      : shm_(world),
        gloo_(other_world(world, "gloo", false)),
        debug_(other_world(world, "debug", true)) {}

  std::vector<BenchRow> run() {
    for (const int64_t bytes : kSizes) {
      debug_mode(bytes);
    }
    for (const auto& [name, world] :
         {std::pair{"shm", shm_}, std::pair{"gloo", gloo_}}) {
      in_flight(name, world);
    }
    c10d_in_flight();
    for (BenchRow& row : record_rows()) {
      rows_.push_back(std::move(row));
    }
    return rows_;
  }

 private:
  static World other_world(
      const World& world, const std::string& name, bool debug) {
    WorldSetup setup = world.impl()->setup();
    setup.backend = "gloo";
    setup.debug_collectives = debug;
    setup.store = c10::make_intrusive<c10d::PrefixStore>(name, setup.store);
    return World(std::make_shared<WorldImpl>(setup));
  }

  void add(const std::string& name, double value, const std::string& against) {
    double other = 0;
    for (const BenchRow& row : rows_) {
      other = row.name == against ? row.value : other;
    }
    rows_.push_back(
        {name, value, "us", against, against.empty() ? 0 : value / other});
  }

  // What comparing every call with the peers' adds to gloo.
  void debug_mode(int64_t bytes) {
    const at::Tensor full = at::ones({bytes / 4});
    const std::string row = "/all_reduce/" + text_of_bytes(bytes);
    const auto measure = [&](const World& world) {
      return fast_us(
          bytes,
          [&] { shm_.group().barrier()->wait(); },
          [&] { world.group().all_reduce(full, ReduceOp::kMax)->wait(); });
    };
    add("gloo" + row, measure(gloo_), "");
    add("gloo_debug" + row, measure(debug_), "gloo" + row);
  }

  void c10d_in_flight() {
    constexpr int64_t kBytes = 2 << 20;
    std::vector<std::vector<at::Tensor>> tensors;
    for (int i = 0; i < 32; ++i) {
      tensors.push_back({at::ones({kBytes / 4})});
    }
    add("c10d/32_all_reduces_of_2MiB/in_flight",
        fast_us(
            32 * kBytes,
            [&] { shm_.group().barrier()->wait(); },
            [&] {
              std::vector<WorkPtr> works;
              for (auto& one : tensors) {
                works.push_back(gloo_.group().backend()->allreduce(one));
              }
              for (const WorkPtr& work : works) {
                work->wait();
              }
            }),
        "gloo/32_all_reduces_of_2MiB/in_flight");
  }

  // 32 all_reduces of 2 MiB.
  void in_flight(const std::string& name, const World& world) {
    constexpr int64_t kBytes = 2 << 20;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 32; ++i) {
      tensors.push_back(at::ones({kBytes / 4}));
    }
    const auto start_barrier = [&] { shm_.group().barrier()->wait(); };
    const std::string blocking = name + "/32_all_reduces_of_2MiB/blocking";
    add(blocking,
        fast_us(
            32 * kBytes,
            start_barrier,
            [&] {
              for (const at::Tensor& tensor : tensors) {
                world.group().all_reduce(tensor, ReduceOp::kMax)->wait();
              }
            }),
        "");
    add(name + "/32_all_reduces_of_2MiB/in_flight",
        fast_us(
            32 * kBytes,
            start_barrier,
            [&] {
              std::vector<WorkPtr> works;
              const Group background = world.group().background();
              for (const at::Tensor& tensor : tensors) {
                works.push_back(background.all_reduce(tensor, ReduceOp::kMax));
              }
              for (const WorkPtr& work : works) {
                work->wait();
              }
            }),
        blocking);
  }

  World shm_;
  World gloo_;
  World debug_; // gloo in the debug mode
  std::vector<BenchRow> rows_;
};

int launch_self(int argc, char** argv) {
  std::array<char, 4096> self{};
  const auto length = readlink("/proc/self/exe", self.data(), self.size() - 1);
  LaunchOptions options;
  options.command.emplace_back(
      self.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  options.ranks = 2;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--ranks" && i + 1 < argc) {
      options.ranks = std::stoll(argv[i + 1]);
    }
    options.command.emplace_back(argv[i]);
  }
  options.output = LaunchOutput::kRankZeroOnly;
  return launch(options);
}

int run_rank(int argc, char** argv) {
  const World world = init();
  const std::vector<BenchRow> rows = Bench(world).run();
  if (world.rank() == 0) {
    const bool to_file = argc > 2 && std::string(argv[1]) == "--json";
    if (to_file) {
      write_json(rows, argv[2]);
    } else {
      fmt::print("{}\n", to_json(rows));
    }
  }
  return 0;
}

} // namespace
} // namespace tessera

int main(int argc, char** argv) {
  return tessera::environment("RANK") ? tessera::run_rank(argc, argv)
                                      : tessera::launch_self(argc, argv);
}
