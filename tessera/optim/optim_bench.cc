// SPDX-License-Identifier: Apache-2.0
// Clip and step of every gradient synchronisation, on the parameters of a Llama
// of 19 million, two ranks as threads with one thread each, against plain
// libtorch on one rank; the update alone; reduction, update and gather in one
// pass. --only steps, updates or one_pass measures one of the three. Prints the
// rows, or writes them to the file named by --json.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <tessera/base/bench_row.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/one_pass_bench.h>
#include <tessera/optim/sharded_optimizer.h>
#include <tessera/optim/update_bench.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace tessera;
using Shapes = std::vector<std::vector<int64_t>>;

constexpr int kWarmUp = 3;
constexpr int kSteps = 15;
constexpr double kLearningRate = 1e-3;

// 6 layers, width 512, 1376 hidden, 256 byte tokens, untied head.
Shapes llama_19m() {
  Shapes shapes = {{256, 512}, {512}, {256, 512}};
  for (int layer = 0; layer < 6; ++layer) {
    const Shapes of_layer = {
        {512, 512},
        {512, 512},
        {512, 512},
        {512, 512},
        {1376, 512},
        {1376, 512},
        {512, 1376},
        {512},
        {512}};
    shapes.insert(shapes.end(), of_layer.begin(), of_layer.end());
  }
  return shapes;
}

template <typename Step>
double median_ms(Step&& step) {
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    step();
    times.push_back(std::chrono::duration<double, std::milli>(
                        std::chrono::steady_clock::now() - begin)
                        .count());
  }
  std::sort(times.begin() + kWarmUp, times.end());
  return times[kWarmUp + kSteps / 2];
}

double plain_ms() {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> first;
  std::vector<at::Tensor> second;
  std::vector<at::Tensor> steps;
  for (const auto& sizes : llama_19m()) {
    at::Tensor& param =
        params.emplace_back(at::full(sizes, 0.5).set_requires_grad(true));
    param.mutable_grad() = gradients.emplace_back(at::full(sizes, 1e-3));
    first.push_back(at::zeros_like(gradients.back()));
    second.push_back(at::zeros_like(gradients.back()));
    steps.push_back(at::full({}, 1.0, at::kFloat));
  }
  const c10::NoGradGuard no_grad;
  return median_ms([&] {
    torch::nn::utils::clip_grad_norm_(params, 1.0);
    at::_fused_adamw_(
        params,
        gradients,
        first,
        second,
        {},
        steps,
        kLearningRate,
        0.9,
        0.999,
        0.01,
        1e-8,
        false,
        false);
  });
}

double sharded_ms(const std::string& backend, GradientSync sync) {
  double result = 0;
  const auto measure = [&](World world) {
    at::set_num_threads(1);
    const DeviceMesh mesh = make_mesh(world, {{"dp", world.size()}});
    std::vector<at::Tensor> params;
    for (const auto& sizes : llama_19m()) {
      const at::Tensor value = at::full(sizes, 0.5);
      params.push_back(
          wrap_local(
              value, intern_contiguous(mesh, {Replicate()}, sizes, c10::kFloat))
              .set_requires_grad(true));
      params.back().mutable_grad() = wrap_local(
          at::full(sizes, 1e-3),
          intern_contiguous(mesh, {Partial()}, sizes, c10::kFloat));
    }
    auto optimizer = shard_optimizer(
        torch::optim::AdamW(params, kLearningRate),
        ShardingStage1("dp"),
        {sync});
    const double ms = median_ms([&] {
      for (const at::Tensor& param : params) {
        local_of(param.grad())
            .unsafeGetTensorImpl()
            ->bump_version(); // as a backward does
      }
      optimizer.clip_grad_norm(1.0);
      optimizer.step();
    });
    if (world.rank() == 0) {
      result = ms;
    }
  };
  run_ranks(
      2, measure, {.backend = backend, .deadline = std::chrono::minutes(5)});
  return result;
}

std::vector<BenchRow> measure_all() {
  at::set_num_threads(1);
  const std::string plain_name = "optim/plain_fused_adamw/1_rank";
  const double plain = plain_ms();
  std::vector<BenchRow> rows = {{plain_name, plain, "ms", "", 0}};
  const std::pair<const char*, GradientSync> modes[] = {
      {"implicit", GradientSync::kImplicit},
      {"all_reduce", GradientSync::kAllReduce},
      {"reduce_scatter", GradientSync::kReduceScatter}};
  for (const char* backend : {"shm", "gloo"}) {
    for (const auto& [name, sync] : modes) {
      const double ms = sharded_ms(backend, sync);
      rows.push_back(
          {fmt::format("optim/{}/{}/2_ranks", name, backend),
           ms,
           "ms",
           plain_name,
           ms / plain});
    }
  }
  return rows;
}

} // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto value_of = [&](const std::string& option) {
    const auto found = std::ranges::find(arguments, option);
    return found == arguments.end() || found + 1 == arguments.end()
        ? std::string()
        : *(found + 1);
  };
  const std::pair<const char*, std::vector<BenchRow> (*)()> parts[] = {
      {"steps", measure_all},
      {"updates", measure_updates},
      {"one_pass", measure_one_pass}};
  std::vector<BenchRow> rows;
  for (const auto& [name, measure] : parts) {
    const std::string only = value_of("--only");
    if (only.empty() || only == name) {
      const std::vector<BenchRow> more = measure();
      rows.insert(rows.end(), more.begin(), more.end());
    }
  }
  if (const std::string path = value_of("--json"); !path.empty()) {
    write_json(rows, path);
  } else {
    fmt::print("{}\n", to_json(rows));
  }
  return 0;
}
