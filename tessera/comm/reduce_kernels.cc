// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>
#include <tessera/comm/narrow_float.h>
#include <tessera/comm/reduce_kernels.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// The next loop's iterations do not depend on each other, though its pointers
// may be equal.
#if defined(__clang__)
#define TESSERA_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define TESSERA_ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace tessera {
namespace {

// Elements that are summed before they are written. Few, so that reading the
// next ones and streaming these interleave.
constexpr int64_t kBlock = 64;

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

struct Job {
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> targets;
  int64_t count;
  Store store;
};

// `bytes` is a multiple of 16, `to` aligned to 16.
[[gnu::always_inline]] inline void stream_bytes(
    std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  for (std::size_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(
        reinterpret_cast<__m128i*>(to + i),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// Streamed stores are seen by others only after this.
void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

bool can_stream(const std::byte* to) {
  return reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
}

// out[i] = op of all sources at begin + i, for `length` elements. T is stored,
// A accumulates.
template <typename T, typename A, typename Op, bool kAverage>
[[gnu::always_inline]] inline void reduce_block(
    std::span<const std::byte* const> sources,
    int64_t begin,
    int64_t length,
    T* out) {
  constexpr bool kDirect = std::is_same_v<T, A> && !kAverage;
  alignas(64) std::array<A, kDirect ? 1 : kBlock> wide;
  A* sum = nullptr;
  if constexpr (kDirect) {
    sum = out;
  } else {
    sum = wide.data();
  }
  const auto source = [&](std::size_t index) {
    return reinterpret_cast<const T*>(sources[index]) + begin;
  };
  const T* first = source(0);
  if (sources.size() == 1) {
    for (int64_t i = 0; i < length; ++i) {
      // An int8_t is a number here, its sign wanted.
      // NOLINTNEXTLINE(bugprone-signed-char-misuse)
      sum[i] = static_cast<A>(first[i]);
    }
  } else {
    const T* second = source(1);
    for (int64_t i = 0; i < length; ++i) {
      sum[i] = Op::apply(static_cast<A>(first[i]), static_cast<A>(second[i]));
    }
  }
  for (std::size_t index = 2; index < sources.size(); ++index) {
    const T* next = source(index);
    for (int64_t i = 0; i < length; ++i) {
      sum[i] = Op::apply(sum[i], static_cast<A>(next[i]));
    }
  }
  if constexpr (!kDirect) {
    const auto ranks = static_cast<A>(sources.size());
    for (int64_t i = 0; i < length; ++i) {
      out[i] =
          static_cast<T>(kAverage ? static_cast<A>(sum[i] / ranks) : sum[i]);
    }
  }
}

// Every source block is read before the same block of a target is written.
template <typename T, typename A, typename Op, bool kAverage>
[[gnu::always_inline]] inline void reduce_blocks(
    const Job& job, bool streamed) {
  alignas(64) std::array<T, kBlock> block;
  const auto* data = reinterpret_cast<const std::byte*>(block.data());
  int64_t begin = 0;
  for (; begin + kBlock <= job.count; begin += kBlock) {
    reduce_block<T, A, Op, kAverage>(job.sources, begin, kBlock, block.data());
    const auto offset = static_cast<std::size_t>(begin) * sizeof(T);
    for (std::byte* target : job.targets) {
      if (streamed) {
        stream_bytes(target + offset, data, sizeof(block));
      } else {
        std::memcpy(target + offset, data, sizeof(block));
      }
    }
  }
  const int64_t rest = job.count - begin;
  reduce_block<T, A, Op, kAverage>(job.sources, begin, rest, block.data());
  for (std::byte* target : job.targets) {
    std::memcpy(
        target + static_cast<std::size_t>(begin) * sizeof(T),
        data,
        static_cast<std::size_t>(rest) * sizeof(T));
  }
}

// Two ranks, results that stay in the caches: no detour by a block.
template <typename T, typename Op>
[[gnu::always_inline]] inline void reduce_two(const Job& job) {
  const T* first = reinterpret_cast<const T*>(job.sources[0]);
  const T* second = reinterpret_cast<const T*>(job.sources[1]);
  T* target = reinterpret_cast<T*>(job.targets[0]);
  T* other = reinterpret_cast<T*>(job.targets[job.targets.size() - 1]);
  if (job.targets.size() == 1) {
    TESSERA_ELEMENTWISE
    for (int64_t i = 0; i < job.count; ++i) {
      target[i] = Op::apply(first[i], second[i]);
    }
  } else {
    TESSERA_ELEMENTWISE
    for (int64_t i = 0; i < job.count; ++i) {
      const T value = Op::apply(first[i], second[i]);
      target[i] = value;
      other[i] = value;
    }
  }
}

template <typename T, typename A, typename Op, bool kAverage>
[[gnu::always_inline]] inline void reduce_job(const Job& job) {
  if constexpr (std::is_same_v<T, A> && !kAverage) {
    if (job.sources.size() == 2 && job.targets.size() <= 2 &&
        job.store == Store::kCached) {
      return reduce_two<T, Op>(job);
    }
  }
  const bool streamed = job.store == Store::kStreamed &&
      std::all_of(job.targets.begin(), job.targets.end(), can_stream);
  if (streamed) {
    reduce_blocks<T, A, Op, kAverage>(job, true);
  } else {
    reduce_blocks<T, A, Op, kAverage>(job, false);
  }
}

template <typename T, typename A, typename Op, bool kAverage>
void reduce_plain(const Job& job) {
  reduce_job<T, A, Op, kAverage>(job);
}

#if defined(__x86_64__)
template <typename T, typename A, typename Op, bool kAverage>
[[gnu::target("avx2")]] void reduce_avx2(const Job& job) {
  reduce_job<T, A, Op, kAverage>(job);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

template <typename T, typename A, typename Op, bool kAverage>
void reduce(const Job& job) {
#if defined(__x86_64__)
  if (has_avx2()) {
    return reduce_avx2<T, A, Op, kAverage>(job);
  }
#endif
  reduce_plain<T, A, Op, kAverage>(job);
}

template <typename T, typename A, typename Average>
void reduce_numbers(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce<T, A, Sum, false>(job);
    case ReduceOp::kAvg:
      return reduce<T, Average, Sum, true>(job);
    case ReduceOp::kMin:
      return reduce<T, A, Min, false>(job);
    case ReduceOp::kMax:
      return reduce<T, A, Max, false>(job);
    case ReduceOp::kProduct:
      return reduce<T, A, Product, false>(job);
  }
}

void reduce_bools(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return reduce<uint8_t, uint8_t, Max, false>(job);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return reduce<uint8_t, uint8_t, Min, false>(job);
    case ReduceOp::kAvg:
      throw UsageError(
          "reduce: avg of bool has no meaning; convert it to a float dtype");
  }
}

void reduce_any(c10::ScalarType dtype, ReduceOp op, const Job& job) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_numbers<float, float, float>(op, job);
    case c10::ScalarType::Double:
      return reduce_numbers<double, double, double>(op, job);
    case c10::ScalarType::BFloat16:
      return reduce_numbers<narrow::BFloat16, float, float>(op, job);
    case c10::ScalarType::Half:
      return reduce_numbers<narrow::Half, float, float>(op, job);
    case c10::ScalarType::Byte:
      return reduce_numbers<uint8_t, uint8_t, int64_t>(op, job);
    case c10::ScalarType::Char:
      return reduce_numbers<int8_t, int8_t, int64_t>(op, job);
    case c10::ScalarType::Short:
      return reduce_numbers<int16_t, int16_t, int64_t>(op, job);
    case c10::ScalarType::Int:
      return reduce_numbers<int32_t, int32_t, int64_t>(op, job);
    case c10::ScalarType::Long:
      return reduce_numbers<int64_t, int64_t, int64_t>(op, job);
    case c10::ScalarType::Bool:
      return reduce_bools(op, job);
    default:
      throw UsageError(
          std::string("reduce: dtype ") + c10::toString(dtype) +
          " cannot be reduced; convert it first");
  }
}

} // namespace

void reduce_in_order(
    c10::ScalarType dtype,
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::span<std::byte* const> targets,
    int64_t count,
    Store store) {
  if (count > 0) {
    reduce_any(dtype, op, {sources, targets, count, store});
    if (store == Store::kStreamed) {
      finish_streaming();
    }
  }
}

void copy_bytes(
    std::byte* to, const std::byte* from, int64_t bytes, Store store) {
  if (bytes <= 0 || to == from) {
    return;
  }
  auto length = static_cast<std::size_t>(bytes);
  if (store == Store::kStreamed && can_stream(to)) {
    const std::size_t streamed = length / 16 * 16;
    stream_bytes(to, from, streamed);
    finish_streaming();
    to += streamed;
    from += streamed;
    length -= streamed;
  }
  std::memcpy(to, from, length);
}

} // namespace tessera
