// SPDX-License-Identifier: Apache-2.0
#include <tessera/optim/finite_check.h>
#include <tessera/optim/parallel_parts.h>
#include <tessera/optim/vector_call.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tessera {
namespace {

constexpr int64_t kBlock = 4096;

// A number whose exponent is all ones is infinite or NaN.
template <typename Word, Word kExponent>
struct FindNonfinite {
  [[gnu::always_inline]] void operator()(
      const Word* words, int64_t count, Word* found) const {
    Word any = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Word exponent = words[i] & kExponent;
      any =
          static_cast<Word>(any | (exponent == kExponent ? Word{1} : Word{0}));
    }
    *found = any;
  }
};

template <typename Word, Word kExponent>
bool are_finite(const void* memory, int64_t numel) {
  const auto* words = static_cast<const Word*>(memory);
  std::atomic<bool> finite = true;
  for_each_part(memory, numel, [&](int64_t begin, int64_t end) {
    for (; begin < end && finite.load(std::memory_order_relaxed);
         begin += kBlock) {
      Word found = 0;
      vector_call(
          FindNonfinite<Word, kExponent>(),
          words + begin,
          std::min(kBlock, end - begin),
          &found);
      if (found != 0) {
        finite.store(false, std::memory_order_relaxed);
      }
    }
  });
  return finite;
}

} // namespace

bool all_finite(const at::Tensor& flat) {
  const void* memory = flat.const_data_ptr();
  switch (flat.scalar_type()) {
    case c10::kFloat:
      return are_finite<uint32_t, 0x7f800000U>(memory, flat.numel());
    case c10::kDouble:
      return are_finite<uint64_t, 0x7ff0000000000000U>(memory, flat.numel());
    case c10::kBFloat16:
      return are_finite<uint16_t, 0x7f80U>(memory, flat.numel());
    default:
      return are_finite<uint16_t, 0x7c00U>(memory, flat.numel());
  }
}

} // namespace tessera
