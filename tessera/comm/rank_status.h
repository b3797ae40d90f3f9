// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

enum class RankPhase : uint32_t { kOutside, kJoined, kLeft };

// What a launcher sees of one of its ranks, through memory that it shares with
// it: whether the rank has joined a world and left it in order, and whether it
// waits in a collective.
struct RankStatus {
  alignas(64) std::atomic<RankPhase> phase;
  std::atomic<uint32_t> waiting; // calls that block now
  std::atomic<uint32_t> calls; // ever begun
};

// The name of the environment variable that tells a rank where its status lies.
inline constexpr const char* kRankStatusVariable = "TESSERA_RANK_STATUS";

// The statuses of `count` ranks in fresh shared memory that other processes
// open by `path`. Freed with the last pointer. Throws IoError.
std::shared_ptr<RankStatus[]> make_rank_statuses(
    int64_t count, std::string& path);

// This process's status, if a launcher gave it one; else null.
std::shared_ptr<RankStatus> find_rank_status(int64_t rank, int64_t count);

// Marks a call that may block.
class WaitMark {
 public:
  explicit WaitMark(RankStatus* status) : status_(status) {
    if (status_ != nullptr) {
      status_->calls.fetch_add(1, std::memory_order_relaxed);
      status_->waiting.fetch_add(1, std::memory_order_relaxed);
    }
  }
  ~WaitMark() {
    if (status_ != nullptr) {
      status_->waiting.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  WaitMark(const WaitMark&) = delete;
  WaitMark& operator=(const WaitMark&) = delete;

 private:
  RankStatus* status_;
};

} // namespace tessera
