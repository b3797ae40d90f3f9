// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/comm/rank_text.h>

namespace tessera {

std::string rank_text(
    int64_t rank, int64_t world_rank, int64_t pid, std::string_view host) {
  const std::string world =
      rank == world_rank ? "" : fmt::format("world rank {}, ", world_rank);
  return fmt::format("rank {} ({}pid {}, host {})", rank, world, pid, host);
}

std::string last_operation_text(std::string_view operation, uint64_t seq) {
  return operation.empty()
      ? ""
      : fmt::format(", last operation {} seq {}", operation, seq);
}

} // namespace tessera
