// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/version.h>

#include <cstdint>
#include <string>

namespace tessera {

// Parts of the library that need what not every machine has (MPI) are shared
// libraries of their own beside it, loaded when wanted. They speak C++ with it,
// so both must come from one build of the same sources.

// Counted up with every change of a type that a plug-in and the library share.
inline constexpr uint32_t kPluginAbi = 2;
inline constexpr const char* kPluginBuild =
    "tessera " TESSERA_VERSION ", libtorch " TORCH_VERSION;

// Begins what a plug-in's entry returns; the same in all versions.
struct PluginHeader {
  uint32_t abi = kPluginAbi;
  const char* build = kPluginBuild;
};

// Where plug-ins lie: the folder of this library.
std::string plugin_folder();

// Loads the plug-in and returns what its entry, an extern "C" function without
// arguments, returned. It stays loaded. Throws UsageError when it cannot be
// loaded or comes from another build.
const PluginHeader& load_plugin(const std::string& path, const char* entry);

} // namespace tessera
