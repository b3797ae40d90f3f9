// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/gloo_backend.h>
#include <tessera/comm/mpi/mpi_plugin.h>
#include <tessera/comm/nccl/nccl_plugin.h>
#include <tessera/comm/shm_backend.h>

#include <algorithm>
#include <array>
#include <filesystem>
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

// Built where libtorch has CUDA.
MakeCollectives open_nccl(const WorldSetup& world) {
  const std::string path = plugin_folder() + "/libtessera_nccl.so";
  if (!std::filesystem::exists(path)) {
    throw UsageError(fmt::format(
        "backend nccl [rank {}/{}]: {} is not there, and groups on cuda need "
        "it; build Tessera against a libtorch with CUDA",
        world.rank,
        world.size,
        path));
  }
  return reinterpret_cast<const NcclPlugin&>(
             load_plugin(path, "tessera_nccl_plugin"))
      .make_group;
}

struct Backend {
  std::string_view name;
  c10::DeviceType device; // whose tensors it moves
  MakeCollectives (*open)(const WorldSetup& world);
};

// Every backend there is. One that lives in a plug-in loads it in `open`.
constexpr std::array kBackends = {
    Backend{
        "shm",
        c10::kCPU,
        [](const WorldSetup&) -> MakeCollectives {
          return make_shm_collectives;
        }},
    Backend{
        "gloo",
        c10::kCPU,
        [](const WorldSetup&) -> MakeCollectives {
          return make_gloo_collectives;
        }},
    Backend{"mpi", c10::kCPU, open_mpi},
    Backend{"nccl", c10::kCUDA, open_nccl}};

std::string name_of(c10::DeviceType device) {
  return c10::DeviceTypeName(device, /*lower_case=*/true);
}

const Backend* find(const std::string& name) {
  const auto* found = std::find_if(
      kBackends.begin(), kBackends.end(), [&name](const Backend& backend) {
        return backend.name == name;
      });
  return found == kBackends.end() ? nullptr : found;
}

} // namespace

void check_backend_name(const std::string& where, const std::string& name) {
  const Backend* found = find(name);
  if (found != nullptr && found->device == c10::kCPU) {
    return;
  }
  std::vector<std::string_view> names;
  for (const Backend& backend : kBackends) {
    if (backend.device == c10::kCPU) {
      names.push_back(backend.name);
    }
  }
  throw UsageError(fmt::format(
      "{}: backend '{}', expected one of {}{}",
      where,
      name,
      fmt::join(names, ", "),
      found == nullptr ? ""
                       : fmt::format(
                             "; meshes on {} have {} by themselves",
                             name_of(found->device),
                             name)));
}

std::string backend_on(c10::DeviceType device, const std::string& cpu_backend) {
  if (device == c10::kCPU) {
    return cpu_backend;
  }
  std::vector<std::string> devices{name_of(c10::kCPU)};
  for (const Backend& backend : kBackends) {
    if (backend.device == device) {
      return std::string(backend.name);
    }
    if (backend.device != c10::kCPU) {
      devices.push_back(name_of(backend.device));
    }
  }
  throw UsageError(fmt::format(
      "no backend for device {}, expected one of {}",
      name_of(device),
      fmt::join(devices, ", ")));
}

MakeCollectives open_backend(const std::string& name, const WorldSetup& world) {
  const Backend* backend = find(name);
  if (backend == nullptr) {
    check_backend_name("world", name);
  }
  return backend->open(world);
}

} // namespace tessera
