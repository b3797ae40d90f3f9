// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/optim/sharded_optimizer.h>

#include <cstdint>
#include <optional>

namespace tessera {

// In which dtypes gradients, states and masters of a parameter are kept.
class Precision {
 public:
  // Throws UsageError for a reduce_dtype that gradients cannot have.
  explicit Precision(const ShardOptions& options);

  // In which gradients accumulate and are reduced.
  c10::ScalarType gradient_dtype(c10::ScalarType parameter) const;
  c10::ScalarType state_dtype(c10::ScalarType parameter) const;
  bool has_master(c10::ScalarType parameter) const;
  // Where parameters are rounded stochastically: the seed of a bucket's draws.
  std::optional<uint64_t> rounding_seed(
      c10::ScalarType parameter, uint64_t bucket) const;

 private:
  NarrowUpdate narrow_update_;
  uint64_t seed_;
  std::optional<c10::ScalarType> reduce_dtype_;
};

} // namespace tessera
