// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace tessera {

enum class JobLauncher { kTorchrun, kOpenMpi, kHydra, kSlurm };

// What a launcher's environment variables tell a process about its job.
struct Job {
  JobLauncher launcher{};
  std::string found; // "OMPI_COMM_WORLD_SIZE=4", for messages
  int64_t rank = 0;
  int64_t size = 1;
  std::optional<int64_t> local_rank;
};

// The job of this process: torchrun's variables (RANK, WORLD_SIZE; `tessera
// run` sets them too), else Open MPI's (OMPI_COMM_WORLD_*), else those of
// MPICH's Hydra and its kin (PMI_*, MPI_LOCAL*), else srun's (SLURM_*). Nothing
// when there are none. Throws UsageError when they make no sense.
std::optional<Job> find_job();

// "Open MPI's mpirun", ...
const char* name_of(JobLauncher launcher);

// Where rank 0 of a job of srun opens its store: the first host of the step,
// and a port that follows from the numbers of job and step. MASTER_ADDR and
// MASTER_PORT override. Throws UsageError.
std::pair<std::string, uint16_t> slurm_rendezvous();

// The first host of Slurm's notation: "gpu[07-09,12],login" gives "gpu07".
// Throws UsageError for what is not in it.
std::string first_slurm_host(const std::string& list);

// 1 to 65535, or UsageError.
uint16_t checked_port(const std::string& name, int64_t value);

} // namespace tessera
