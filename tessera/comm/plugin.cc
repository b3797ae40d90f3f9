// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/plugin.h>

#include <cstring>
#include <filesystem>

namespace tessera {
namespace {

using Entry = const PluginHeader* (*)();

void check_build(const std::string& path, const PluginHeader& header) {
  if (header.abi != kPluginAbi ||
      std::strcmp(header.build, kPluginBuild) != 0) {
    throw UsageError(fmt::format(
        "plug-in {}: built as interface {} of {}, this library is {} of {}; "
        "take both from one build",
        path,
        header.abi,
        header.build,
        kPluginAbi,
        kPluginBuild));
  }
}

} // namespace

std::string plugin_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&plugin_folder), &info) == 0 ||
      info.dli_fname == nullptr) {
    return ".";
  }
  std::error_code error;
  const auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? "." : path.parent_path().string();
}

const PluginHeader& load_plugin(const std::string& path, const char* entry) {
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    throw UsageError(
        fmt::format("plug-in {}: cannot be loaded: {}", path, dlerror()));
  }
  const auto function = reinterpret_cast<Entry>(dlsym(plugin, entry));
  if (function == nullptr) {
    throw UsageError(fmt::format(
        "plug-in {}: has no function {}; is it a plug-in of Tessera?",
        path,
        entry));
  }
  const PluginHeader& header = *function();
  check_build(path, header);
  return header;
}

} // namespace tessera
