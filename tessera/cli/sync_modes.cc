// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/sync_modes.h>

#include <array>

namespace tessera::cli {

std::span<const SyncMode> sync_modes() {
  static constexpr std::array<SyncMode, 4> kModes = {{
      {"implicit", "kImplicit", GradientSync::kImplicit},
      {"all-reduce", "kAllReduce", GradientSync::kAllReduce},
      {"reduce-scatter", "kReduceScatter", GradientSync::kReduceScatter},
      {"bucketed", "kBucketed", GradientSync::kBucketed},
  }};
  return kModes;
}

std::vector<std::string> sync_options() {
  std::vector<std::string> options;
  for (const SyncMode& mode : sync_modes()) {
    options.emplace_back(mode.option);
  }
  return options;
}

GradientSync sync_of(const std::string& option) {
  for (const SyncMode& mode : sync_modes()) {
    if (option == mode.option) {
      return mode.sync;
    }
  }
  return GradientSync::kDefault;
}

} // namespace tessera::cli
