// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/dtensor/call_key.h>
#include <tessera/dtensor/exec_plan.h>

#include <array>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

// The plan of one signature.
struct CacheEntry {
  std::vector<uint64_t> words;
  std::unique_ptr<ExecPlan> plan;

  bool matches(const CallKey& key) const {
    return words.size() == key.size() &&
        std::memcmp(words.data(), key.words(), key.size() * sizeof(uint64_t)) ==
        0;
  }
};

// The plans of one operator on one thread.
class PlanCache {
 public:
  CacheEntry* find(const CallKey& key) {
    CacheEntry*& slot = slots_[key.hash() % kSlots];
    if (C10_LIKELY(slot != nullptr && slot->matches(key))) {
      return slot;
    }
    const auto [begin, end] = all_.equal_range(key.hash());
    for (auto it = begin; it != end; ++it) {
      if (it->second->matches(key)) {
        slot = it->second.get();
        return slot;
      }
    }
    return nullptr;
  }

  CacheEntry* insert(const CallKey& key, std::unique_ptr<ExecPlan> plan) {
    if (all_.size() >= kMost) {
      slots_.fill(nullptr);
      all_.clear();
    }
    auto entry = std::make_unique<CacheEntry>();
    entry->words.assign(key.words(), key.words() + key.size());
    entry->plan = std::move(plan);
    CacheEntry* result = entry.get();
    all_.emplace(key.hash(), std::move(entry));
    slots_[key.hash() % kSlots] = result;
    return result;
  }

 private:
  static constexpr size_t kSlots = 64;
  static constexpr size_t kMost = 4096;
  std::array<CacheEntry*, kSlots> slots_{};
  std::unordered_multimap<uint64_t, std::unique_ptr<CacheEntry>> all_;
};

} // namespace tessera
