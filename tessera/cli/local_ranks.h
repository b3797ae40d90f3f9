// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::cli {

// The world that a launcher put this process into, by its variables; none: no
// launcher.
std::optional<int64_t> launched_world_size();

// Runs this program again with the same arguments on `ranks` local processes,
// and returns the first failing one's exit code, or 0. Their output goes
// straight to this program's: only rank 0 writes more than errors.
int run_self_on_ranks(int64_t ranks);

} // namespace tessera::cli
