// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

// The 16-bit numbers as kernels hold them, rounded to nearest, ties to even.
namespace tessera::narrow {

// A bfloat16 whose conversions compilers can put into vectors: c10's go by a
// branch.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const bool nan = (word & 0x7fffffff) > 0x7f800000;
    bits = static_cast<uint16_t>(nan ? 0x7fc0 : rounded);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

// A float16, likewise. A subnormal's mantissa counts units of 2^-24.
struct Half {
  uint16_t bits;

  Half() = default;
  explicit Half(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    const uint32_t size = word & 0x7fffffff;
    const uint32_t normal =
        (size + 0xfff + ((size >> 13) & 1) - (112U << 23)) >> 13;
    // The unit of the last place of numbers around one half is 2^-24.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5F) -
        std::bit_cast<uint32_t>(0.5F);
    uint32_t half = size < 0x38800000 ? subnormal : normal; // 2^-14
    half = size >= 0x477ff000 ? 0x7c00 : half; // 65520 rounds to infinity
    half = size > 0x7f800000 ? 0x7e00 : half; // NaN
    bits = static_cast<uint16_t>(half | ((word >> 16) & 0x8000));
  }
  explicit operator float() const {
    const uint32_t size = bits & 0x7fffU;
    const uint32_t normal = (size << 13) + (112U << 23);
    const auto subnormal = std::bit_cast<uint32_t>(
        static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24F);
    uint32_t word = size < 0x400 ? subnormal : normal;
    word = size >= 0x7c00 ? (size << 13) | 0x7f800000 : word;
    return std::bit_cast<float>(word | (bits & 0x8000U) << 16);
  }
};

} // namespace tessera::narrow
