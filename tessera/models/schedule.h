// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera {

// Learning rate by step: a linear rise over `warmup` steps, then half a cosine
// down to `final_ratio` of the peak at the last step.
struct Schedule {
  double peak = 1e-3;
  double final_ratio = 0.1;
  int64_t warmup = 0;
  int64_t steps = 1; // of the whole run

  // For step 0 .. steps-1; later steps keep the last rate.
  double at(int64_t step) const;
};

} // namespace tessera
