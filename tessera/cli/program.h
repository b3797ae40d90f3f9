// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

// The `tessera` program. Returns its exit code: 0, 1 when the work failed, 2
// when it was asked for wrongly, or what `run` passes on. Errors go to standard
// error as one line that begins with "tessera: ".
int run_program(int argc, const char* const* argv);

} // namespace tessera::cli
