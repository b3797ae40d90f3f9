// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/comm/reduce_op.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// How results are written. Streamed stores go past the caches: right for
// results so large that they would push out what is still needed.
enum class Store { kCached, kStreamed };

// target[i] = sources[0][i] op sources[1][i] op ..., strictly in that order,
// for `count` elements and every target. bfloat16 and float16 accumulate in
// float32 and round once. Averages of integers divide the exact sum and cut
// towards zero. min and max pass NaN on. bool: sum and max are "or", product
// and min are "and". A target may be one of the sources; other overlap is not
// allowed. The numbers do not depend on the processor. Throws UsageError for
// other dtypes and for avg of bool.
void reduce_in_order(
    c10::ScalarType dtype,
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::span<std::byte* const> targets,
    int64_t count,
    Store store = Store::kCached);

// The same with one target.
inline void reduce_in_order(
    c10::ScalarType dtype,
    ReduceOp op,
    std::span<const std::byte* const> sources,
    std::byte* out,
    int64_t count) {
  reduce_in_order(
      dtype, op, sources, std::span<std::byte* const>(&out, 1), count);
}

// A copy whose stores go as `store` says; large ones gain by kStreamed, since
// the target's old contents need not be read. No overlap, or the same place.
void copy_bytes(
    std::byte* to,
    const std::byte* from,
    int64_t bytes,
    Store store = Store::kCached);

} // namespace tessera
