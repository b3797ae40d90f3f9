// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

namespace tessera {

#if defined(__x86_64__)
namespace detail {
template <typename Body, typename... Args>
[[gnu::target("avx2")]] void call_avx2(const Body& body, Args... args) {
  body(args...);
}

inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
} // namespace detail
#endif

// Calls `body`, whose operator() is always inlined, compiled for AVX2 where the
// processor has it. No fused multiply-add is used, so the numbers are the same
// either way.
template <typename Body, typename... Args>
void vector_call(const Body& body, Args... args) {
#if defined(__x86_64__)
  if (detail::has_avx2()) {
    return detail::call_avx2(body, args...);
  }
#endif
  body(args...);
}

} // namespace tessera

// The next loop's iterations do not depend on each other, though its pointers
// may be equal.
#if defined(__clang__)
#define TESSERA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TESSERA_INDEPENDENT _Pragma("GCC ivdep")
#endif
