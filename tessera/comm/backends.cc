// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/gloo_backend.h>
#include <tessera/comm/mpi/mpi_plugin.h>
#include <tessera/comm/shm_backend.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

MakeCollectives open_mpi(const WorldSetup& world) {
  if (!world.mpi) {
    throw UsageError(fmt::format(
        "backend mpi [rank {}/{}]: this world was not found through MPI; start "
        "the ranks by mpirun, mpiexec or srun and let init() find the world",
        world.rank,
        world.size));
  }
  return [session = world.mpi](const GroupSetup& setup) {
    return session->make_group(setup);
  };
}

struct Backend {
  std::string_view name;
  MakeCollectives (*open)(const WorldSetup& world);
};

// Every backend there is. One that lives in a plug-in loads it in `open`.
constexpr std::array kBackends = {
    Backend{
        "shm",
        [](const WorldSetup&) -> MakeCollectives {
          return make_shm_collectives;
        }},
    Backend{
        "gloo",
        [](const WorldSetup&) -> MakeCollectives {
          return make_gloo_collectives;
        }},
    Backend{"mpi", open_mpi}};

const Backend* find(const std::string& name) {
  const auto* found = std::find_if(
      kBackends.begin(), kBackends.end(), [&name](const Backend& backend) {
        return backend.name == name;
      });
  return found == kBackends.end() ? nullptr : found;
}

} // namespace

void check_backend_name(const std::string& where, const std::string& name) {
  if (find(name) == nullptr) {
    std::vector<std::string_view> names;
    names.reserve(kBackends.size());
    for (const Backend& backend : kBackends) {
      names.push_back(backend.name);
    }
    throw UsageError(fmt::format(
        "{}: backend '{}', expected one of {}",
        where,
        name,
        fmt::join(names, ", ")));
  }
}

MakeCollectives open_backend(const std::string& name, const WorldSetup& world) {
  check_backend_name("world", name);
  return find(name)->open(world);
}

} // namespace tessera
