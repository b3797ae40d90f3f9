// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera {

// Sleeps while `word` holds `expected`, at most `limit`. May wake early for no
// reason. Works across processes that share the word.
void futex_wait(
    const std::atomic<uint32_t>& word,
    uint32_t expected,
    std::chrono::microseconds limit);

// Wakes all that sleep on `word`.
void futex_wake_all(const std::atomic<uint32_t>& word);

// Tells the core that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace tessera
