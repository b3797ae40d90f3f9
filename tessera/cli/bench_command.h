// SPDX-License-Identifier: Apache-2.0
#pragma once

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class App;
}

namespace tessera::cli {

// Adds `tessera bench dispatch`. When it is asked for, parsing runs it and sets
// `exit_code`, which must live as long as `app`.
void declare_bench_command(CLI::App& app, int& exit_code);

} // namespace tessera::cli
