// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera {

// Calls `body(begin, end)` for parts that together are [0, numel), cut at
// multiples of 4096, on libtorch's own threads if there are enough elements.
// `memory` is where the range lies: at least one byte per element. (Not
// at::parallel_for, which is serial in sources that are not compiled with
// OpenMP.)
void for_each_part(
    const void* memory,
    int64_t numel,
    c10::function_ref<void(int64_t begin, int64_t end)> body);

} // namespace tessera
