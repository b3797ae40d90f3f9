// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera {

// A random order of 0 .. size-1 that takes no memory: the same seed gives the
// same order on every rank and machine.
class Permutation {
 public:
  // `size` is at least 1 and at most 2^62.
  Permutation(int64_t size, uint64_t seed);

  // What stands at place `index` of the order; every value comes exactly once.
  int64_t operator()(int64_t index) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  uint64_t size_;
  uint64_t seed_;
  unsigned half_bits_;
};

} // namespace tessera
