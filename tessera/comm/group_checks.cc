// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/counts.h>
#include <tessera/comm/group_checks.h>

namespace tessera {

[[noreturn]] void refuse(
    const GroupImpl& group, CollectiveKind kind, const std::string& text) {
  throw UsageError(fmt::format(
      "{} [rank {}/{}, group {}]: {}",
      name_of(kind),
      group.rank,
      group.world_ranks.size(),
      group.name,
      text));
}

void check_tensor(
    const GroupImpl& group, CollectiveKind kind, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(group, kind, "got an undefined tensor");
  }
  if (tensor.device() != group.device || tensor.layout() != at::kStrided) {
    refuse(
        group,
        kind,
        fmt::format(
            "got a {} tensor on {}, expected a dense one on {}; copy it there "
            "first, or take the group of a mesh on its device",
            tensor.layout() == at::kStrided ? "dense" : "sparse",
            tensor.device().str(),
            group.device.str()));
  }
  if (!tensor.is_contiguous()) {
    refuse(
        group,
        kind,
        fmt::format(
            "got strides {} for shape {}, expected a contiguous tensor; call "
            "contiguous()",
            bracketed(tensor.strides()),
            bracketed(tensor.sizes())));
  }
}

void check_counts(
    const GroupImpl& group,
    CollectiveKind kind,
    const char* what,
    std::span<const int64_t> counts,
    int64_t numel) {
  if (counts.size() != group.world_ranks.size()) {
    refuse(
        group,
        kind,
        fmt::format(
            "{} has {} entries, expected one per rank", what, counts.size()));
  }
  for (const int64_t count : counts) {
    if (count < 0) {
      refuse(
          group,
          kind,
          fmt::format("{} {} hold a negative count", what, bracketed(counts)));
    }
  }
  if (sum_of(counts) != numel) {
    refuse(
        group,
        kind,
        fmt::format(
            "{} {} add up to {}, the tensor has {} elements",
            what,
            bracketed(counts),
            sum_of(counts),
            numel));
  }
}

void check_own_part(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& part,
    std::span<const int64_t> counts) {
  const int64_t own = counts[static_cast<std::size_t>(group.rank)];
  if (part.numel() != own) {
    refuse(
        group,
        kind,
        fmt::format(
            "this rank's part has {} elements, its count is {}",
            part.numel(),
            own));
  }
}

void check_dtypes(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& in,
    const at::Tensor& out) {
  if (in.scalar_type() != out.scalar_type()) {
    refuse(
        group,
        kind,
        fmt::format(
            "input is {}, output is {}; they must match",
            c10::toString(in.scalar_type()),
            c10::toString(out.scalar_type())));
  }
}

void check_reduction(
    const GroupImpl& group,
    CollectiveKind kind,
    const at::Tensor& tensor,
    ReduceOp op) {
  const at::ScalarType type = tensor.scalar_type();
  const bool known = type == at::kFloat || type == at::kDouble ||
      type == at::kBFloat16 || type == at::kHalf || type == at::kBool ||
      type == at::kByte || type == at::kChar || type == at::kShort ||
      type == at::kInt || type == at::kLong;
  if (!known || (type == at::kBool && op == ReduceOp::kAvg)) {
    refuse(
        group,
        kind,
        fmt::format(
            "cannot reduce {} by {}; convert it to a float dtype",
            c10::toString(type),
            name_of(op)));
  }
}

void check_peer(const GroupImpl& group, CollectiveKind kind, int64_t peer) {
  const auto size = static_cast<int64_t>(group.world_ranks.size());
  if (peer < 0 || peer >= size) {
    refuse(
        group,
        kind,
        fmt::format("rank {} is not in this group of {}", peer, size));
  }
}

} // namespace tessera
