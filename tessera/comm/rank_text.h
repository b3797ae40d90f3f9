// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

// How messages call a rank, alike over all backends: "rank 3 (pid 17, host
// box)", and "rank 1 (world rank 3, pid 17, host box)" where its number in the
// group is another than in the world.
std::string rank_text(
    int64_t rank, int64_t world_rank, int64_t pid, std::string_view host);

// What follows it when the rank is to blame: ", last operation all_reduce seq
// 12"; empty when there was none.
std::string last_operation_text(std::string_view operation, uint64_t seq);

} // namespace tessera
