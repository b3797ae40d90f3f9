// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/narrow_float.h>
#include <tessera/dtensor/philox.h>
#include <tessera/optim/block_convert.h>
#include <tessera/optim/vector_call.h>

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

namespace tessera {
namespace {

using narrow::BFloat16;
using narrow::Half;

// The 16-bit types convert from and to float alone.
template <typename From, typename To>
[[gnu::always_inline]] inline To converted(From value) {
  if constexpr (
      std::is_floating_point_v<From> && !std::is_floating_point_v<To>) {
    return To(static_cast<float>(value));
  } else if constexpr (!std::is_floating_point_v<From>) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

struct Convert {
  template <typename From, typename To>
  [[gnu::always_inline]] void operator()(
      const From* from, To* to, int64_t count) const {
    TESSERA_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      to[i] = converted<From, To>(from[i]);
    }
  }
};

template <typename Function>
void with_type(c10::ScalarType dtype, Function&& function) {
  switch (dtype) {
    // Each type is another instance.
    // NOLINTNEXTLINE(bugprone-branch-clone)
    case c10::kFloat:
      return function(float());
    case c10::kDouble:
      return function(double());
    case c10::kBFloat16:
      return function(BFloat16());
    case c10::kHalf:
      return function(Half());
    default:
      throw UsageError(fmt::format(
          "optimizer update: got dtype {}, expected float32, float64, bfloat16 "
          "or float16; keep such tensors out of the optimizer",
          c10::toString(dtype)));
  }
}

[[gnu::always_inline]] inline uint16_t rounded(
    float value, uint32_t draw, BFloat16 /*type*/) {
  const auto word = std::bit_cast<uint32_t>(value);
  const bool finite = (word & 0x7f800000) != 0x7f800000;
  return finite ? static_cast<uint16_t>((word + draw) >> 16)
                : BFloat16(value).bits;
}

[[gnu::always_inline]] inline uint16_t rounded(
    float value, uint32_t draw, Half /*type*/) {
  const auto word = std::bit_cast<uint32_t>(value);
  const uint32_t size = word & 0x7fffffff;
  // Below 2^-14 the unit is 2^-24; in 2^-16 of it, below 2^26:
  const bool tiny = size < 0x38800000;
  const auto fine = static_cast<uint32_t>(
      static_cast<int32_t>(std::bit_cast<float>(tiny ? size : 0) * 0x1p40F));
  const uint32_t subnormal = (fine + draw) >> 16;
  const uint32_t normal = (size - (112U << 23) + (draw >> 3)) >> 13;
  const uint32_t half = (tiny ? subnormal : normal) | ((word >> 16) & 0x8000);
  const bool fits = size < 0x47800000; // 2^16; not infinity, not NaN
  return fits ? static_cast<uint16_t>(half) : Half(value).bits;
}

constexpr int64_t kPerDraw = 8; // elements that one Philox block serves
constexpr int64_t kDraws = 64; // made at a time

struct Draw {
  // For the elements from kPerDraw * first on: the halves of the words, low
  // ones first.
  [[gnu::always_inline]] void operator()(
      const Philox* philox, uint64_t first, uint16_t* halves) const {
    alignas(64) std::array<std::array<uint32_t, kDraws>, 4> words;
    for (int64_t i = 0; i < kDraws; ++i) {
      const auto block = (*philox)(first + static_cast<uint64_t>(i));
      for (size_t word = 0; word < 4; ++word) {
        words[word][static_cast<size_t>(i)] = block[word];
      }
    }
    for (size_t i = 0; i < kDraws; ++i) {
      for (size_t word = 0; word < 4; ++word) {
        halves[8 * i + 2 * word] = static_cast<uint16_t>(words[word][i]);
        halves[8 * i + 2 * word + 1] =
            static_cast<uint16_t>(words[word][i] >> 16);
      }
    }
  }
};

template <typename Narrow>
struct RoundAll {
  [[gnu::always_inline]] void operator()(
      const float* from,
      const uint16_t* draws,
      uint16_t* to,
      int64_t count) const {
    TESSERA_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      to[i] = rounded(from[i], draws[i], Narrow());
    }
  }
};

template <typename Narrow>
void stochastic(
    const float* from,
    uint16_t* to,
    int64_t count,
    const Philox& philox,
    int64_t first) {
  alignas(64) std::array<uint16_t, kPerDraw * kDraws> draws;
  for (int64_t i = 0; i < count;) {
    const int64_t element = first + i;
    const int64_t skipped = element % kPerDraw;
    vector_call(
        Draw(),
        &philox,
        static_cast<uint64_t>(element / kPerDraw),
        draws.data());
    const int64_t length =
        std::min<int64_t>(count - i, kPerDraw * kDraws - skipped);
    vector_call(
        RoundAll<Narrow>(),
        from + i,
        static_cast<const uint16_t*>(draws.data() + skipped),
        to + i,
        length);
    i += length;
  }
}

} // namespace

template <typename T>
void widen(c10::ScalarType dtype, const void* from, T* to, int64_t count) {
  with_type(dtype, [&]<typename From>(From) {
    vector_call(Convert(), static_cast<const From*>(from), to, count);
  });
}

template <typename T>
void narrow_nearest(
    c10::ScalarType dtype, const T* from, void* to, int64_t count) {
  with_type(dtype, [&]<typename To>(To) {
    vector_call(Convert(), from, static_cast<To*>(to), count);
  });
}

template void widen(c10::ScalarType, const void*, float*, int64_t);
template void widen(c10::ScalarType, const void*, double*, int64_t);
template void narrow_nearest(c10::ScalarType, const float*, void*, int64_t);
template void narrow_nearest(c10::ScalarType, const double*, void*, int64_t);

void narrow_stochastic(
    c10::ScalarType dtype,
    const float* from,
    void* to,
    int64_t count,
    uint64_t seed,
    uint64_t stream,
    int64_t first) {
  const Philox philox(seed, 0, stream);
  auto* out = static_cast<uint16_t*>(to);
  if (dtype == c10::kBFloat16) {
    stochastic<BFloat16>(from, out, count, philox, first);
  } else if (dtype == c10::kHalf) {
    stochastic<Half>(from, out, count, philox, first);
  } else {
    throw UsageError(fmt::format(
        "optimizer update: got stochastic rounding to {}, expected bfloat16 or "
        "float16; leave it out for wider parameters",
        c10::toString(dtype)));
  }
}

} // namespace tessera
