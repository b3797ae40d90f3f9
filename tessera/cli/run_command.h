// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class App;
}

namespace tessera::cli {

// Adds `tessera run -n N [--] program args...`. `after_marker` is the command
// line from its first "--" on, which the parser does not see. When the
// subcommand is asked for, parsing runs it and sets `exit_code`, which must
// live as long as `app`.
void declare_run_command(
    CLI::App& app,
    const std::vector<std::string>& after_marker,
    int& exit_code);

} // namespace tessera::cli
