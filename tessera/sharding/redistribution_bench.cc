// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <tessera/sharding/redistribution.h>

namespace tessera {
namespace {

const std::vector<int64_t> kSizes{64, 128, 32, 256};

void price(
    benchmark::State& state,
    const std::vector<Axis>& axes,
    const Placements& from,
    const Placements& to) {
  const DeviceMesh mesh = describe_mesh(axes);
  SpecPtr source = intern_contiguous(mesh, from, kSizes, c10::kFloat);
  SpecPtr target = intern_contiguous(mesh, to, kSizes, c10::kFloat);
  for (auto _ : state) {
    benchmark::DoNotOptimize(redistribution_us(source, target, CostModel()));
  }
}

void price_one_axis(benchmark::State& state) {
  price(state, {{"a", 2}}, {Partial()}, {Shard(0)});
}
BENCHMARK(price_one_axis);

void price_two_axes(benchmark::State& state) {
  price(
      state,
      {{"a", 2}, {"b", 2}},
      {Partial(), Partial()},
      {Shard(0), Shard(1)});
}
BENCHMARK(price_two_axes);

void price_nest_of_two(benchmark::State& state) {
  price(
      state,
      {{"a", 2}, {"b", 2}},
      {Replicate(), Shard(0)},
      {Shard(0), Shard(0)});
}
BENCHMARK(price_nest_of_two);

void price_three_axes(benchmark::State& state) {
  price(
      state,
      {{"a", 2}, {"b", 2}, {"c", 2}},
      {Partial(), Shard(0), Shard(0)},
      {Shard(0), Shard(1), Shard(2)});
}
BENCHMARK(price_three_axes);

void price_four_axes(benchmark::State& state) {
  price(
      state,
      {{"a", 2}, {"b", 2}, {"c", 2}, {"d", 2}},
      {Shard(0), Shard(1), Shard(2), Shard(3)},
      {Shard(3), Shard(2), Shard(1), Shard(0)});
}
BENCHMARK(price_four_axes);

void intern_known_spec(benchmark::State& state) {
  const DeviceMesh mesh = describe_mesh({{"a", 2}, {"b", 2}});
  const Placements placements{Shard(0), Shard(0)};
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        intern_contiguous(mesh, placements, kSizes, c10::kFloat));
  }
}
BENCHMARK(intern_known_spec);

} // namespace
} // namespace tessera
