// SPDX-License-Identifier: Apache-2.0
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <tessera/base/error.h>
#include <tessera/comm/reduce_kernels.h>

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

namespace tessera {
namespace {

constexpr int64_t kBlock =
    512; // elements that accumulate in the first-level cache

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) { // wraps around, as ATen's does
      return static_cast<T>(
          static_cast<std::make_unsigned_t<T>>(a) +
          static_cast<std::make_unsigned_t<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(
          static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

// T is stored, A accumulates. Every source block is read before the same block
// of `out` is written.
template <typename T, typename A, typename Op, bool kAverage>
void reduce_blocks(
    std::span<const std::byte* const> sources, std::byte* out, int64_t count) {
  std::array<A, kBlock> sum;
  const auto ranks = static_cast<A>(sources.size());
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    const T* first = reinterpret_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < length; ++i) {
      // An int8_t is a number here, its sign wanted.
      // NOLINTNEXTLINE(bugprone-signed-char-misuse)
      sum[static_cast<std::size_t>(i)] = static_cast<A>(first[i]);
    }
    for (std::size_t source = 1; source < sources.size(); ++source) {
      const T* next = reinterpret_cast<const T*>(sources[source]) + begin;
      for (int64_t i = 0; i < length; ++i) {
        sum[static_cast<std::size_t>(i)] = Op::apply(
            sum[static_cast<std::size_t>(i)], static_cast<A>(next[i]));
      }
    }
    T* target = reinterpret_cast<T*>(out) + begin;
    for (int64_t i = 0; i < length; ++i) {
      const A value = sum[static_cast<std::size_t>(i)];
      target[i] =
          static_cast<T>(kAverage ? static_cast<A>(value / ranks) : value);
    }
  }
}

template <typename T, typename A, typename Average>
void reduce_numbers(
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::byte* out,
    int64_t count) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<T, A, Sum, false>(sources, out, count);
    case ReduceOp::kAvg:
      return reduce_blocks<T, Average, Sum, true>(sources, out, count);
    case ReduceOp::kMin:
      return reduce_blocks<T, A, Min, false>(sources, out, count);
    case ReduceOp::kMax:
      return reduce_blocks<T, A, Max, false>(sources, out, count);
    case ReduceOp::kProduct:
      return reduce_blocks<T, A, Product, false>(sources, out, count);
  }
}

void reduce_bools(
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::byte* out,
    int64_t count) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return reduce_blocks<uint8_t, uint8_t, Max, false>(sources, out, count);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return reduce_blocks<uint8_t, uint8_t, Min, false>(sources, out, count);
    case ReduceOp::kAvg:
      throw UsageError(
          "reduce: avg of bool has no meaning; convert it to a float dtype");
  }
}

} // namespace

void reduce_in_order(
    c10::ScalarType dtype,
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::byte* out,
    int64_t count) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_numbers<float, float, float>(op, sources, out, count);
    case c10::ScalarType::Double:
      return reduce_numbers<double, double, double>(op, sources, out, count);
    case c10::ScalarType::BFloat16:
      return reduce_numbers<c10::BFloat16, float, float>(
          op, sources, out, count);
    case c10::ScalarType::Half:
      return reduce_numbers<c10::Half, float, float>(op, sources, out, count);
    case c10::ScalarType::Byte:
      return reduce_numbers<uint8_t, uint8_t, int64_t>(op, sources, out, count);
    case c10::ScalarType::Char:
      return reduce_numbers<int8_t, int8_t, int64_t>(op, sources, out, count);
    case c10::ScalarType::Short:
      return reduce_numbers<int16_t, int16_t, int64_t>(op, sources, out, count);
    case c10::ScalarType::Int:
      return reduce_numbers<int32_t, int32_t, int64_t>(op, sources, out, count);
    case c10::ScalarType::Long:
      return reduce_numbers<int64_t, int64_t, int64_t>(op, sources, out, count);
    case c10::ScalarType::Bool:
      return reduce_bools(op, sources, out, count);
    default:
      throw UsageError(
          std::string("reduce: dtype ") + c10::toString(dtype) +
          " cannot be reduced; convert it first");
  }
}

} // namespace tessera
