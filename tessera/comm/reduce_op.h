// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

// How a reduction combines the ranks' values.
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };

// "sum", "avg", "min", "max", "product".
std::string_view name_of(ReduceOp op);

} // namespace tessera
