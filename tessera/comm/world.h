// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/group.h>
#include <tessera/comm/record.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <typeindex>

namespace c10d {
class Store;
}

namespace tessera {

class WorldImpl;

// All ranks of a job, seen from one of them. A cheap handle; copies mean the
// same world.
class World {
 public:
  World() = default;
  explicit World(std::shared_ptr<WorldImpl> impl) : impl_(std::move(impl)) {}

  int64_t rank() const;
  int64_t size() const;
  int64_t local_rank() const; // rank among those on this machine
  const Group& group() const; // all ranks
  Record& record() const;
  c10::intrusive_ptr<c10d::Store> store() const;

  // This rank's device of a type: the CPU, or the GPU of its local rank's
  // number, or the only one its process sees. Throws UsageError when there is
  // none.
  c10::Device device(c10::DeviceType type) const;

  // A group of the given world ranks, whose calls move tensors on each rank's
  // device of that type: on the CPU by the world's backend, on GPUs by NCCL.
  // Collective over those ranks only, which all pass the same arguments in the
  // same order. Throws UsageError, TimeoutError, PeerError, IoError.
  Group new_group(
      std::span<const int64_t> world_ranks,
      const std::string& name,
      c10::DeviceType device = c10::kCPU) const;

  // State that a later room keeps per world: one T, made at its first use
  // (default constructor). Thread-safe.
  template <typename T>
  T& state() const {
    return *static_cast<T*>(state_slot(typeid(T), [] {
      return std::shared_ptr<void>(std::make_shared<T>());
    }));
  }

  // A handle that does not keep the world alive. For state that the world
  // itself keeps (see state()): an owning handle there would be a cycle, and
  // the world would never end.
  World unowned() const;

  bool operator==(const World& other) const {
    return impl_ == other.impl_;
  }
  explicit operator bool() const {
    return impl_ != nullptr;
  }
  const std::shared_ptr<WorldImpl>& impl() const {
    return impl_;
  }

 private:
  void* state_slot(std::type_index type, std::shared_ptr<void> (*make)()) const;

  std::shared_ptr<WorldImpl> impl_;
};

struct InitOptions {
  // "shm", "gloo", "mpi", or "auto": shm when all ranks share the machine, else
  // mpi where mpirun or mpiexec started them or they came with a communicator,
  // else gloo. The variable TESSERA_BACKEND overrides it.
  std::string backend = "auto";
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
  // Of a program that runs MPI itself: MPI_Comm_c2f of the communicator whose
  // ranks make the world. It is duplicated; the program keeps it.
  std::optional<int> mpi_communicator = std::nullopt;
  // Compares every collective with the peers' before it runs, on backends that
  // do not do so by themselves (all but shm): a mismatch is then an error on
  // every rank that says who called what. Costs one small all_gather per call.
  // TESSERA_DEBUG_COLLECTIVES=1 asks for the same. The same on all ranks.
  bool debug_collectives = false;
};

// Finds the world: the communicator in `options`; else the variables of
// torchrun and `tessera run` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
// MASTER_PORT), of Open MPI's mpirun (OMPI_COMM_WORLD_*), of MPICH's mpiexec
// (PMI_*, MPI_LOCAL*) or of srun (SLURM_*); else MPI_COMM_WORLD where the
// program has initialised MPI; else a world of one. Under mpirun and mpiexec it
// initialises MPI unless the program has, and finalises at exit what it has
// initialised. Collective over the job. Blocks until all ranks have met. Throws
// UsageError, TimeoutError, PeerError, IoError.
World init(const InitOptions& options = {});

} // namespace tessera
