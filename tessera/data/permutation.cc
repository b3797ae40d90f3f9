// SPDX-License-Identifier: Apache-2.0
// A Feistel network is a bijection of the numbers of 2k bits whatever its round
// function does. It is walked until the value falls below `size` (Black and
// Rogaway 2002, "Ciphers with arbitrary finite domains"): since the walk
// follows a cycle of the bijection and starts below `size`, it ends there, and
// it stays a bijection. 4^k is less than four times `size`, so that four steps
// are expected at most.
#include <tessera/data/permutation.h>

#include <bit>

namespace tessera {
namespace {

constexpr unsigned kRounds = 4;

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

} // namespace

Permutation::Permutation(int64_t size, uint64_t seed)
    : size_(static_cast<uint64_t>(size)), seed_(mix(seed)) {
  const auto bits = static_cast<unsigned>(std::bit_width(size_ - 1));
  half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
}

uint64_t Permutation::encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (unsigned round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (mix(right ^ mix(seed_ + round)) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t index) const {
  uint64_t value = encrypt(static_cast<uint64_t>(index));
  while (value >= size_) {
    value = encrypt(value);
  }
  return static_cast<int64_t>(value);
}

} // namespace tessera
