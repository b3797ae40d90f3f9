// SPDX-License-Identifier: Apache-2.0
// Checks of a group's collectives against a plain model, for any backend and
// device, for ranks that are threads and ranks that are processes. All checks
// are collective; they report through gtest.
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/world.h>

#include <array>
#include <cstdint>
#include <vector>

namespace tessera::conformance {

using Counts = std::vector<int64_t>;

constexpr std::array kDtypes = {
    at::kFloat,
    at::kDouble,
    at::kBFloat16,
    at::kHalf,
    at::kByte,
    at::kChar,
    at::kShort,
    at::kInt,
    at::kLong,
    at::kBool};
constexpr std::array kOps = {
    ReduceOp::kSum,
    ReduceOp::kAvg,
    ReduceOp::kMin,
    ReduceOp::kMax,
    ReduceOp::kProduct};

// Where a rank's tensors lie. Ranks may differ.
enum class Memory { kPlain, kAllocated, kUnaligned };

// all_reduce and reduce_scatter, with even and uneven counts.
void check_reductions(
    const Group& group,
    int64_t numel,
    at::ScalarType dtype,
    ReduceOp op,
    Memory memory = Memory::kPlain);
// all_gather with even and uneven counts, broadcast from every root.
void check_movements(
    const Group& group,
    int64_t numel,
    at::ScalarType dtype,
    Memory memory = Memory::kPlain);
// Rank a gives rank b (a + 2b) % 3 * scale elements.
void check_all_to_all(
    const Group& group, int64_t scale, Memory memory = Memory::kPlain);
// Everybody sends to the next rank, in sizes around every border.
void check_ring(const Group& group);
// 64 MiB over every kind, in memory of both kinds at once.
void check_large(const Group& group);
// `count` sequences of eight random calls on the world and on groups of some of
// its ranks, several in flight; each rank's memory of another kind. The same
// seeds give the same calls on every rank.
void check_random_sequences(
    const World& world,
    uint64_t first_seed,
    uint64_t count,
    c10::DeviceType device = c10::kCPU);

} // namespace tessera::conformance
