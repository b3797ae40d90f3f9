// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace tessera {

// Numbers of float32, float64, bfloat16 or float16 to those that a kernel
// computes with (T is float or double), and back. Other dtypes are a
// UsageError. `dtype` is that of the memory without a type.
template <typename T>
void widen(c10::ScalarType dtype, const void* from, T* to, int64_t count);

// Rounds to nearest, ties to even.
template <typename T>
void narrow_nearest(
    c10::ScalarType dtype, const T* from, void* to, int64_t count);

// To bfloat16 or float16, rounded up as often as the value is near its upper
// neighbour. Element i draws its 16 bits from word (first + i) of the stream
// (seed, count), so that any cut of a tensor gives the same numbers.
void narrow_stochastic(
    c10::ScalarType dtype,
    const float* from,
    void* to,
    int64_t count,
    uint64_t seed,
    uint64_t stream,
    int64_t first);

} // namespace tessera
