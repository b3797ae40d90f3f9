// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <tessera/mesh/placement.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace tessera {

struct TensorSpec;

// What tells the specs of one mesh apart; placements are canonical.
struct SpecKey {
  const Placements& placements;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  c10::ScalarType dtype;
};

// The specs of one mesh, each once. Thread-safe. Never forgets.
class SpecTable {
 public:
  const TensorSpec* find(const SpecKey& key) const;

  // The spec that is kept: `spec`, or an equal one that came first.
  const TensorSpec* insert(std::unique_ptr<const TensorSpec> spec);

 private:
  const TensorSpec* find_locked(size_t hash, const SpecKey& key) const;

  mutable std::shared_mutex mutex_;
  std::unordered_multimap<size_t, std::unique_ptr<const TensorSpec>> specs_;
};

} // namespace tessera
