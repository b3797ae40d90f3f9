// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/interruption.h>

namespace tessera::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void note(int /*signal*/) {
  interrupted = 1;
}

} // namespace

Interruption::Interruption() {
  interrupted = 0;
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &before_);
}

Interruption::~Interruption() {
  sigaction(SIGINT, &before_, nullptr);
}

// NOLINTNEXTLINE(readability-convert-member-functions-to-static): only while it
// lives
bool Interruption::came() const {
  return interrupted != 0;
}

} // namespace tessera::cli
