// SPDX-License-Identifier: Apache-2.0
#include <tessera/models/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera {

double Schedule::at(int64_t step) const {
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const int64_t decay = std::max<int64_t>(steps - 1 - warmup, 1);
  const double progress = std::min(
      1.0, static_cast<double>(step - warmup) / static_cast<double>(decay));
  return peak *
      (final_ratio +
       (1 - final_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

} // namespace tessera
