// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/optim/sharded_optimizer.h>

#include <span>
#include <string>
#include <vector>

namespace tessera::cli {

// A way to synchronise gradients, as the commands name it.
struct SyncMode {
  const char* option; // of --sync: "reduce-scatter"
  const char* name; // in tables and rows: "kReduceScatter"
  GradientSync sync;
};

// Every mode but the default, which is one of them; the first is what the
// others are compared with.
std::span<const SyncMode> sync_modes();

// The options of all modes.
std::vector<std::string> sync_options();

// The mode of an option; kDefault for "default".
GradientSync sync_of(const std::string& option);

} // namespace tessera::cli
