// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/ones.h>
#include <tessera/comm/group_impl.h>
#include <tessera/comm/record_bench.h>
#include <tessera/comm/record_impl.h>

#include <algorithm>
#include <chrono>
#include <memory>

namespace tessera {
namespace {

// Does nothing, at once.
class NoCollectives : public Collectives {
 public:
  WorkPtr all_reduce(const at::Tensor& /*tensor*/, ReduceOp /*op*/) override {
    return done_;
  }
  WorkPtr reduce_scatter(
      const at::Tensor& /*in*/,
      const at::Tensor& /*out*/,
      std::span<const int64_t> /*counts*/,
      ReduceOp /*op*/) override {
    return done_;
  }
  WorkPtr all_gather(
      const at::Tensor& /*in*/,
      const at::Tensor& /*out*/,
      std::span<const int64_t> /*counts*/) override {
    return done_;
  }
  WorkPtr all_to_all(
      const at::Tensor& /*in*/,
      const at::Tensor& /*out*/,
      std::span<const int64_t> /*in_counts*/,
      std::span<const int64_t> /*out_counts*/) override {
    return done_;
  }
  WorkPtr broadcast(const at::Tensor& /*tensor*/, int64_t /*root*/) override {
    return done_;
  }
  WorkPtr send(
      const at::Tensor& /*tensor*/, int64_t /*peer*/, int /*tag*/) override {
    return done_;
  }
  WorkPtr recv(
      const at::Tensor& /*tensor*/, int64_t /*peer*/, int /*tag*/) override {
    return done_;
  }
  WorkPtr barrier() override {
    return done_;
  }
  c10::intrusive_ptr<c10d::Backend> backend() override {
    return nullptr;
  }
  void abort(const std::string& /*reason*/) override {}
  void leave() override {}

 private:
  WorkPtr done_ = done_work();
};

} // namespace

std::vector<BenchRow> record_rows() {
  constexpr int kCalls = 20'000;
  auto impl = std::make_shared<GroupImpl>();
  impl->world_ranks = {0, 1};
  impl->name = "data_parallel_ranks"; // longer than a string holds in place
  impl->record = std::make_shared<Record>();
  impl->record_group = impl->record->impl().add_group(
      {.id = "bench", .name = impl->name, .world_ranks = impl->world_ranks});
  impl->collectives = std::make_unique<NoCollectives>();
  const Group group(impl);
  const at::Tensor tensor = at::ones({256, 64});
  const AskerScope scope("optimizer.step/bucket");
  double best = 1e9;
  for (int run = 0; run < 10; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      group.all_reduce(tensor, ReduceOp::kSum)->wait();
    }
    const std::chrono::duration<double, std::nano> taken =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count() / kCalls);
  }
  return {{"record/call_that_does_nothing", best, "ns", "", 0}};
}

} // namespace tessera
