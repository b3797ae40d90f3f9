// SPDX-License-Identifier: Apache-2.0
#include <linux/futex.h>
#include <sys/syscall.h>
#include <tessera/comm/shm_futex.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera {

static_assert(
    sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
    std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(
    const std::atomic<uint32_t>& word,
    uint32_t expected,
    std::chrono::microseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1'000'000;
  time.tv_nsec = (limit.count() % 1'000'000) * 1'000;
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace tessera
