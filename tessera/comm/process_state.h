// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera {

// Stopped by a signal or a debugger, as far as /proc tells.
bool is_stopped(int64_t pid);

// Cores that this process may run on; at least 1.
int64_t allowed_cores();

} // namespace tessera
