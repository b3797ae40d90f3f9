// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/optim/update_rule.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

namespace tessera {

// Neighbouring elements that one call updates, all contiguous in memory. What
// the rule works on are its values: the master where there is one, else the
// parameter.
struct UpdateRange {
  void* parameter = nullptr;
  c10::ScalarType parameter_type = c10::kFloat;
  // float32 values of a parameter of 16 bits, which is written then, not read.
  float* master = nullptr;
  // One, or those of all ranks in rank order: summed in that order in their
  // own dtype, as reduce_scatter sums them.
  std::span<const void* const> gradients;
  c10::ScalarType gradient_type = c10::kFloat;
  bool average = false; // of the gradients, instead of their sum
  // In the order of state_fields. Without a type: float32 beside a master, else
  // of the parameter's dtype.
  std::array<void*, 3> states = {};
  std::optional<c10::ScalarType> state_type = std::nullopt;
  // Where else the new parameter goes, bit for bit: the peers' copies.
  std::span<void* const> copies;
  int64_t numel = 0;
  // Of the first element, counted over everything that shares a rounding seed.
  int64_t first_element = 0;
};

struct UpdateStep {
  int64_t step = 1; // how many updates these elements have had, with this one
  double gradient_scale = 1; // multiplies gradients: unscaling and clipping
  // Scaled gradients are cut to [-limit, limit].
  double gradient_limit = std::numeric_limits<double>::infinity();
  // Rounds parameters of 16 bits stochastically: up as often as the value is
  // near the upper neighbour. The draw depends on seed, step and the global
  // index of the element only, so that no sharding changes it.
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

// One step of the rule, as torch's optimizer of that name does it, in one pass
// over memory: read gradients, multiply by the scale, cut, apply weight decay
// and rule, write values, states, parameter and copies. Computes in float32, in
// float64 for such parameters. The numbers do not depend on the processor, on
// threads, or on how elements are divided into calls. Uses libtorch's threads
// for large ranges. Throws UsageError for dtypes other than float32, float64,
// bfloat16, float16, and a master beside a parameter of more than 16 bits.
void run_update(
    UpdateRule rule,
    const ParamOptions& options,
    const UpdateStep& step,
    const UpdateRange& range);

} // namespace tessera
