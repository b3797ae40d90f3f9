// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/optim/one_pass_bench.h>
#include <tessera/optim/one_pass_update.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tessera {
namespace {

constexpr int64_t kElements = int64_t{1} << 24;
constexpr int64_t kRanks = 2;
constexpr int kRepetitions = 15;
// Both gradients, parameter and two states read; parameter, states and the
// peer's parameter written.
constexpr double kBytesPerElement = 4 * (2 + 3 + 3 + 1);

// a = b + s c with stores past the caches, so that 12 bytes an element move.
void triad(float* a, const float* b, const float* c, int64_t numel) {
#if defined(__x86_64__)
  const __m128 scale = _mm_set1_ps(3);
  for (int64_t i = 0; i < numel; i += 4) {
    _mm_stream_ps(
        a + i,
        _mm_add_ps(_mm_load_ps(b + i), _mm_mul_ps(scale, _mm_load_ps(c + i))));
  }
  _mm_sfence();
#else
  for (int64_t i = 0; i < numel; ++i) {
    a[i] = b[i] + 3 * c[i];
  }
#endif
}

// One rank's buffers and the ways to make a step with them.
class Bench {
 public:
  explicit Bench(const Group& group)
      : group_(group),
        part_(kElements / group.size()),
        gradients_(group.allocate({kElements}).fill_(1e-3)),
        parameters_(group.allocate({kElements}).fill_(0.5)),
        own_(at::zeros({part_})),
        first_(at::zeros({part_})),
        second_(at::zeros({part_})),
        counts_(static_cast<size_t>(group.size()), part_) {}

  void step_in_one_pass() {
    ShardRun run;
    run.begin = begin();
    run.numel = part_;
    run.options = &options_;
    run.step.step = ++steps_;
    run.states = {first_.data_ptr(), second_.data_ptr(), nullptr};
    update_in_one_pass(
        group_, UpdateRule::kAdamW, gradients_, parameters_, false, {run})
        ->wait();
  }

  void step_separately() {
    group_.reduce_scatter(gradients_, own_, counts_, ReduceOp::kSum)->wait();
    const at::Tensor part = parameters_.narrow(0, begin(), part_);
    const void* gradient = own_.const_data_ptr();
    UpdateRange range;
    range.parameter = part.mutable_data_ptr();
    range.gradients = {&gradient, 1};
    range.states = {first_.data_ptr(), second_.data_ptr(), nullptr};
    range.numel = part_;
    run_update(UpdateRule::kAdamW, options_, {.step = ++steps_}, range);
    group_.all_gather(part, parameters_, counts_)->wait();
  }

  void run_triad() {
    triad(
        own_.data_ptr<float>(),
        first_.const_data_ptr<float>(),
        second_.const_data_ptr<float>(),
        part_);
    group_.barrier()->wait();
  }

  // The shortest of the repetitions, all ranks beginning together.
  static void keep_best(
      const Group& group, double& best_ms, const std::function<void()>& step) {
    group.barrier()->wait();
    const auto begin = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double, std::milli> time =
        std::chrono::steady_clock::now() - begin;
    best_ms = std::min(best_ms, time.count());
  }

 private:
  int64_t begin() const {
    return group_.rank() * part_;
  }

  Group group_;
  int64_t part_;
  at::Tensor gradients_;
  at::Tensor parameters_;
  at::Tensor own_;
  at::Tensor first_;
  at::Tensor second_;
  std::vector<int64_t> counts_;
  torch::optim::AdamWOptions options_{1e-3};
  int64_t steps_ = 0;
};

struct Times {
  double one_pass = std::numeric_limits<double>::infinity();
  double separate = std::numeric_limits<double>::infinity();
  double triad = std::numeric_limits<double>::infinity();
};

} // namespace

std::vector<BenchRow> measure_one_pass() {
  Times times;
  const auto fn = [&](World world) {
    at::set_num_threads(1);
    const Group group = world.group();
    Bench bench(group);
    Times own;
    for (int i = 0; i < kRepetitions; ++i) { // in turns
      Bench::keep_best(group, own.one_pass, [&] { bench.step_in_one_pass(); });
      Bench::keep_best(group, own.separate, [&] { bench.step_separately(); });
      Bench::keep_best(group, own.triad, [&] { bench.run_triad(); });
    }
    if (world.rank() == 0) {
      times = own;
    }
  };
  run_ranks(kRanks, fn);
  const double triad_gb_s = kElements * 12 / (times.triad * 1e6);
  const double bound = kElements * kBytesPerElement / (triad_gb_s * 1e6);
  const std::string bound_name = "one_pass/bytes_at_triad_bandwidth/2_ranks";
  const std::string separate_name = "one_pass/separate/shm/2_ranks";
  const std::string name = "one_pass/fused/shm/2_ranks";
  return {
      {"one_pass/triad/2_ranks", triad_gb_s, "GB/s", "", 0},
      {bound_name, bound, "ms", "", 0},
      {separate_name, times.separate, "ms", bound_name, times.separate / bound},
      {name, times.one_pass, "ms", bound_name, times.one_pass / bound},
      {name,
       times.one_pass,
       "ms",
       separate_name,
       times.one_pass / times.separate}};
}

} // namespace tessera
