// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

// Whether what this program writes to standard output ends on a terminal, so
// that a line may be written over.
bool live_output();

} // namespace tessera::cli
