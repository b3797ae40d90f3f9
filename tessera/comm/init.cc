// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/loopback.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/world_impl.h>

#include <array>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

namespace tessera {
namespace {

constexpr const char* kTorchrunVariables =
    "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK)";

// A launcher that sets its own variables and not torchrun's.
void refuse_other_launchers() {
  static constexpr std::array<std::pair<const char*, const char*>, 4> kForeign =
      {{{"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
        {"PMI_SIZE", "MPICH's mpiexec"},
        {"MPI_LOCALNRANKS", "Hydra's mpiexec"},
        {"SLURM_NTASKS", "srun"}}};
  for (const auto& [variable, launcher] : kForeign) {
    const auto value = environment(variable);
    if (value && *value != "1") {
      throw UsageError(fmt::format(
          "init: {}={} says that {} started this; joining its world is not "
          "built yet; start the ranks with `tessera run -n N` or torchrun, "
          "or set {}",
          variable,
          *value,
          launcher,
          kTorchrunVariables));
    }
  }
}

int64_t required_int(const std::string& name) {
  const auto value = environment_int(name);
  if (!value) {
    throw UsageError(fmt::format(
        "init: {} is not set though others of {} are; set all or none",
        name,
        kTorchrunVariables));
  }
  return *value;
}

int64_t ranged(
    const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw UsageError(
        fmt::format("init: {}={}, expected {} to {}", name, value, low, high));
  }
  return value;
}

std::string chosen_backend(const InitOptions& options) {
  std::string backend =
      environment("TESSERA_BACKEND").value_or(options.backend);
  if (backend != "auto" && backend != "shm" && backend != "gloo") {
    throw UsageError(fmt::format(
        "init: backend '{}', expected auto, shm or gloo; see InitOptions and "
        "TESSERA_BACKEND",
        backend));
  }
  return backend;
}

bool debug_collectives(const InitOptions& options) {
  const auto asked = environment("TESSERA_DEBUG_COLLECTIVES");
  if (asked && *asked != "0" && *asked != "1") {
    throw UsageError(fmt::format(
        "init: TESSERA_DEBUG_COLLECTIVES={}, expected 0 or 1", *asked));
  }
  return asked ? *asked == "1" : options.debug_collectives;
}

c10::intrusive_ptr<c10d::Store> connect(
    int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  const auto address = environment("MASTER_ADDR");
  if (!address) {
    throw UsageError(fmt::format(
        "init: MASTER_ADDR is not set though others of {} are; set all or none",
        kTorchrunVariables));
  }
  const int64_t port =
      ranged("MASTER_PORT", required_int("MASTER_PORT"), 1, 65535);
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<uint16_t>(port);
  // torchrun's agent may serve the store already; then every rank is a client.
  store_options.isServer = rank == 0 &&
      environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True";
  if (store_options.isServer && is_loopback(*address)) {
    // By itself the store would listen on every interface of the machine.
    store_options.masterListenFd =
        listen_on_loopback(*address, static_cast<uint16_t>(port));
  }
  store_options.numWorkers = static_cast<std::size_t>(size);
  store_options.waitWorkers = false;
  store_options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(*address, store_options);
  } catch (const std::exception& error) {
    throw IoError(fmt::format(
        "init [rank {}/{}]: cannot reach the store at {}:{}; is rank 0 up and "
        "the port free? ({})",
        rank,
        size,
        *address,
        port,
        brief(error)));
  }
}

// Fills in what follows from who shares a machine with whom.
void place(WorldSetup& setup) {
  const auto key = [](int64_t rank) { return fmt::format("machine/{}", rank); };
  const std::string own = machine_identity();
  setup.store->set(key(setup.rank), own);
  meet_at_store(*setup.store, "init", setup.rank, setup.size, setup.timeout);
  int64_t before = 0;
  for (int64_t peer = 0; peer < setup.size; ++peer) {
    const bool same = setup.store->get_to_str(key(peer)) == own;
    setup.one_host = setup.one_host && same;
    before += same && peer < setup.rank ? 1 : 0;
  }
  setup.local_rank = environment_int("LOCAL_RANK").value_or(before);
}

} // namespace

World init(const InitOptions& options) {
  WorldSetup setup;
  setup.debug_collectives = debug_collectives(options);
  setup.backend = chosen_backend(options);
  setup.timeout = options.timeout;
  const bool launched = environment("RANK") || environment("WORLD_SIZE");
  if (!launched) {
    refuse_other_launchers();
    setup.backend = "shm"; // a world of one uses none
    setup.store = c10::make_intrusive<c10d::HashStore>();
    return World(std::make_shared<WorldImpl>(std::move(setup)));
  }
  setup.size = ranged("WORLD_SIZE", required_int("WORLD_SIZE"), 1, 1 << 20);
  setup.rank = ranged("RANK", required_int("RANK"), 0, setup.size - 1);
  setup.status = find_rank_status(setup.rank, setup.size);
  const WaitMark mark(setup.status.get());
  if (setup.status) {
    setup.status->phase.store(RankPhase::kJoined);
  }
  setup.store = connect(setup.rank, setup.size, setup.timeout);
  place(setup);
  if (setup.backend == "shm" && !setup.one_host) {
    throw UsageError(fmt::format(
        "init [rank {}/{}]: backend shm needs all ranks on one machine (one "
        "host and PID namespace), these are on several; use gloo or auto",
        setup.rank,
        setup.size));
  }
  if (setup.backend == "auto") {
    setup.backend = setup.one_host ? "shm" : "gloo";
  }
  return World(std::make_shared<WorldImpl>(setup));
}

} // namespace tessera
