// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace tessera {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011): a keyed bijection from a 128-bit counter to four random 32-bit
// words. There is no state, so any element's number can be had on any rank.
class Philox {
 public:
  // The key is the seed; scope and count tell draws apart and fill the
  // counter's upper half.
  Philox(uint64_t seed, uint64_t scope, uint64_t count)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        stream_(mix(scope) + count) {}

  std::array<uint32_t, 4> operator()(uint64_t counter) const {
    std::array<uint32_t, 4> c = {
        static_cast<uint32_t>(counter),
        static_cast<uint32_t>(counter >> 32),
        static_cast<uint32_t>(stream_),
        static_cast<uint32_t>(stream_ >> 32)};
    uint32_t k0 = key_[0];
    uint32_t k1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
      const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
      c = {
          static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0,
          static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1,
          static_cast<uint32_t>(p0)};
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return c;
  }

  // A seed for another generator, this draw's own.
  uint64_t seed() const {
    const std::array<uint32_t, 4> block = (*this)(~uint64_t{0});
    return static_cast<uint64_t>(block[0]) << 32 | block[1];
  }

 private:
  // Spreads scopes over the counter space, so that scope s's count n is not
  // scope s+1's count n-1. Scope 0 stays where it is.
  static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
  }

  std::array<uint32_t, 2> key_;
  uint64_t stream_;
};

} // namespace tessera
