// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group_impl.h>

#include <cstdint>
#include <span>
#include <string>

namespace tessera {

// What a call's arguments must be on the rank that makes it, whatever the
// backend. Throw UsageError, before anything is announced to the peers: a
// refused call leaves the group as it was.
[[noreturn]] void refuse(
    const GroupImpl& group, CollectiveKind kind, const std::string& text);
void check_tensor(
    const GroupImpl& group, CollectiveKind kind, const at::Tensor& tensor);
void check_counts(
    const GroupImpl& group,
    CollectiveKind kind,
    const char* what,
    std::span<const int64_t> counts,
    int64_t numel);
void check_own_part(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& part,
    std::span<const int64_t> counts);
void check_dtypes(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& in,
    const at::Tensor& out);
void check_reduction(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& tensor,
    ReduceOp op);
void check_peer(const GroupImpl& group, CollectiveKind kind, int64_t peer);

} // namespace tessera
