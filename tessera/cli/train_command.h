// SPDX-License-Identifier: Apache-2.0
#pragma once

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class App;
}

namespace tessera::cli {

// Adds `tessera train`. When it is asked for, parsing runs it and sets
// `exit_code`; `exit_code` must live as long as `app`.
void declare_train_command(CLI::App& app, int& exit_code);

} // namespace tessera::cli
