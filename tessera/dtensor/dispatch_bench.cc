// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dispatch_bench.h>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/dtensor/dispatch_cases.h>

#include <algorithm>
#include <chrono>

namespace tessera {
namespace {

double seconds_of_run(
    const DispatchCase& which,
    const std::vector<DispatchOperands>& signatures,
    int64_t calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    which.call(signatures[static_cast<size_t>(i) % signatures.size()]);
  }
  const std::chrono::duration<double> spent =
      std::chrono::steady_clock::now() - begin;
  return spent.count();
}

struct Times {
  double plain_us;
  double distributed_us;
};

// The two alternate, so that a change of the machine's speed meets both.
Times measure(
    const DispatchCase& which,
    const DeviceMesh& mesh,
    bool grad,
    const DispatchBenchOptions& options) {
  const DispatchSignatures signatures = dispatch_signatures(which, mesh, grad);
  at::AutoGradMode mode(grad);
  double plain = 1e9;
  double distributed = 1e9;
  for (int64_t run = 0; run <= options.runs; ++run) {
    plain =
        std::min(plain, seconds_of_run(which, signatures.plain, options.calls));
    distributed = std::min(
        distributed,
        seconds_of_run(which, signatures.distributed, options.calls));
  }
  const double to_us = 1e6 / static_cast<double>(options.calls);
  return {plain * to_us, distributed * to_us};
}

void measure_all(
    const DeviceMesh& mesh,
    bool grad,
    const DispatchBenchOptions& options,
    std::vector<BenchRow>& rows) {
  const std::string prefix = fmt::format(
      "dispatch/world_{}/{}", mesh.size(), grad ? "autograd" : "no_grad");
  std::vector<double> differences;
  for (const DispatchCase& which : dispatch_cases()) {
    const Times times = measure(which, mesh, grad, options);
    const double difference = times.distributed_us - times.plain_us;
    const std::string name = prefix + "/" + which.name;
    rows.push_back({name + "/plain", times.plain_us, "us", "", 0});
    rows.push_back(
        {name + "/distributed",
         times.distributed_us,
         "us",
         name + "/plain",
         times.distributed_us / times.plain_us});
    rows.push_back({name + "/difference", difference, "us", "", 0});
    differences.push_back(difference);
  }
  std::sort(differences.begin(), differences.end());
  rows.push_back(
      {prefix + "/median_difference",
       differences[differences.size() / 2],
       "us",
       "",
       0});
  rows.push_back(
      {prefix + "/largest_difference", differences.back(), "us", "", 0});
}

} // namespace

std::vector<BenchRow> run_dispatch_bench(const DispatchBenchOptions& options) {
  std::vector<BenchRow> rows;
  for (const int64_t ranks : {1, 2}) {
    RunRanksOptions run;
    run.deadline = std::chrono::minutes(10);
    run_ranks(
        ranks,
        [&](World world) {
          const DeviceMesh mesh = make_mesh(world, {{"dp", ranks}});
          if (world.rank() != 0) {
            return; // no call communicates
          }
          measure_all(mesh, false, options, rows);
          measure_all(mesh, true, options, rows);
        },
        run);
  }
  return rows;
}

} // namespace tessera
