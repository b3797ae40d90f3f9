// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi_loader.h>

#include <array>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera {
namespace {

constexpr const char* kPluginVariable = "TESSERA_MPI_PLUGIN";
constexpr std::array kLibraries = {"openmpi", "mpich"};

std::string path_for(const std::string& library) {
  return fmt::format("{}/libtessera_mpi_{}.so", plugin_folder(), library);
}

// The MPI library that this process has already, by its own description. That
// call is allowed before MPI_Init.
std::optional<std::string> loaded_library() {
  constexpr std::size_t kLongest = 1 << 14;
  using GetVersion = int (*)(char*, int*);
  const auto get_version = reinterpret_cast<GetVersion>(
      dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  if (get_version == nullptr) {
    return std::nullopt;
  }
  std::string text(kLongest, '\0');
  int length = 0;
  get_version(text.data(), &length);
  return text.find("Open MPI") != std::string::npos ? "openmpi" : "mpich";
}

std::optional<std::string> library_of_launcher() {
  if (environment("OMPI_COMM_WORLD_SIZE") || environment("PMIX_RANK")) {
    return "openmpi";
  }
  if (environment("PMI_SIZE") || environment("PMI_RANK") ||
      environment("MPI_LOCALNRANKS")) {
    return "mpich";
  }
  return std::nullopt;
}

std::string first_there_is() {
  for (const char* library : kLibraries) {
    if (std::filesystem::exists(path_for(library))) {
      return library;
    }
  }
  throw UsageError(fmt::format(
      "init: MPI is wanted and there is no libtessera_mpi_*.so in {}; build "
      "Tessera where an MPI library is installed (libopenmpi-dev or "
      "libmpich-dev), or start the ranks with `tessera run -n N` or torchrun",
      plugin_folder()));
}

std::string chosen_path() {
  auto library = environment(kPluginVariable);
  if (library && library->find('/') != std::string::npos) {
    return *library;
  }
  library = library ? library : loaded_library();
  library = library ? library : library_of_launcher();
  std::string path = path_for(library ? *library : first_there_is());
  if (!std::filesystem::exists(path)) {
    throw UsageError(fmt::format(
        "init: {} is wanted and {} is not there; build Tessera where {} is "
        "installed, name another plug-in in {}, or start the ranks with "
        "`tessera run -n N` or torchrun",
        *library,
        path,
        *library == "openmpi" ? "Open MPI (libopenmpi-dev)"
                              : "MPICH (libmpich-dev)",
        kPluginVariable));
  }
  return path;
}

} // namespace

bool program_runs_mpi() {
  using Ask = int (*)(int*);
  const auto ask = [](const char* name) {
    const auto function = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, name));
    int answer = 0;
    return function != nullptr && function(&answer) == 0 && answer != 0;
  };
  return ask("MPI_Initialized") && !ask("MPI_Finalized");
}

std::shared_ptr<MpiSession> open_mpi_session(const MpiSessionOptions& options) {
  const auto& plugin = reinterpret_cast<const MpiPlugin&>(
      load_plugin(chosen_path(), "tessera_mpi_plugin"));
  return plugin.open(options);
}

} // namespace tessera
