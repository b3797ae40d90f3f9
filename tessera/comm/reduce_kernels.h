// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/comm/reduce_op.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// out[i] = sources[0][i] op sources[1][i] op ..., strictly in that order, for
// `count` elements. bfloat16 and float16 accumulate in float32 and round once.
// Averages of integers divide the exact sum and cut towards zero. min and max
// pass NaN on. bool: sum and max are "or", product and min are "and". `out` may
// be one of the sources; other overlap is not allowed. Throws UsageError for
// other dtypes and for avg of bool.
void reduce_in_order(
    c10::ScalarType dtype,
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::byte* out,
    int64_t count);

} // namespace tessera
