// SPDX-License-Identifier: Apache-2.0
#include <tessera/mesh/spec_table.h>
#include <tessera/mesh/tensor_spec.h>

namespace tessera {

namespace {

void mix(size_t& seed, int64_t value) {
  uint64_t x = seed ^ static_cast<uint64_t>(value);
  x *= 0x9e3779b97f4a7c15ULL;
  seed = x ^ (x >> 29U);
}

size_t hash_of(const SpecKey& key) {
  size_t seed = static_cast<size_t>(key.dtype) + 1;
  for (const Placement& placement : key.placements) {
    mix(seed, static_cast<int64_t>(placement.kind()));
    mix(seed, static_cast<int64_t>(placement.op()));
    mix(seed, placement.dim());
    mix(seed, placement.unit());
  }
  for (int64_t size : key.sizes) {
    mix(seed, size);
  }
  for (int64_t stride : key.strides) {
    mix(seed, stride);
  }
  return seed;
}

SpecKey key_of(const TensorSpec& spec) {
  return {spec.placements, spec.sizes, spec.strides, spec.dtype};
}

bool same(const SpecKey& a, const SpecKey& b) {
  return a.dtype == b.dtype && a.placements == b.placements &&
      a.sizes == b.sizes && a.strides == b.strides;
}

} // namespace

const TensorSpec* SpecTable::find_locked(
    size_t hash, const SpecKey& key) const {
  const auto range = specs_.equal_range(hash);
  for (auto it = range.first; it != range.second; ++it) {
    if (same(key_of(*it->second), key)) {
      return it->second.get();
    }
  }
  return nullptr;
}

const TensorSpec* SpecTable::find(const SpecKey& key) const {
  const size_t hash = hash_of(key);
  const std::shared_lock lock(mutex_);
  return find_locked(hash, key);
}

const TensorSpec* SpecTable::insert(std::unique_ptr<const TensorSpec> spec) {
  const SpecKey key = key_of(*spec);
  const size_t hash = hash_of(key);
  const std::unique_lock lock(mutex_);
  if (const TensorSpec* known = find_locked(hash, key)) {
    return known;
  }
  return specs_.emplace(hash, std::move(spec))->second.get();
}

} // namespace tessera
