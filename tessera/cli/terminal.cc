// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/terminal.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tessera::cli {

bool live_output() {
  const char* term = std::getenv("TERM");
  return ::isatty(STDOUT_FILENO) == 1 && term != nullptr &&
      std::string_view(term) != "dumb";
}

} // namespace tessera::cli
