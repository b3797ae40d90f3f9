// SPDX-License-Identifier: Apache-2.0
#pragma once

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class App;
}

namespace tessera::cli {

// Adds `tessera comm dump FILES...`, which compares the calls that the ranks of
// a failed job wrote down and prints where they first differ. When the
// subcommand is asked for, parsing runs it and sets `exit_code`, which must
// live as long as `app`.
void declare_comm_command(CLI::App& app, int& exit_code);

} // namespace tessera::cli
