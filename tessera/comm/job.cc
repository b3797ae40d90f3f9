// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/job.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kLargestWorld = 1 << 20;

// The variables by which one launcher tells a process its place.
struct Names {
  JobLauncher launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
};

constexpr Names kTorchrun = {
    JobLauncher::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Names kOpenMpi = {
    JobLauncher::kOpenMpi,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK"};
constexpr Names kHydra = {
    JobLauncher::kHydra, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"};
constexpr Names kSlurm = {
    JobLauncher::kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};
// Set for the tasks of a step, not in a batch script.
constexpr const char* kSlurmStepSize = "SLURM_STEP_NUM_TASKS";

int64_t required(
    const char* name, const Names& names, int64_t low, int64_t high) {
  const auto value = environment_int(name);
  if (!value) {
    throw UsageError(fmt::format(
        "init: {} is not set though {} sets it with {} and {}; set all or none",
        name,
        name_of(names.launcher),
        names.rank,
        names.size));
  }
  if (*value < low || *value > high) {
    throw UsageError(
        fmt::format("init: {}={}, expected {} to {}", name, *value, low, high));
  }
  return *value;
}

Job job_by(const Names& names) {
  Job job;
  job.launcher = names.launcher;
  job.size = required(names.size, names, 1, kLargestWorld);
  job.rank = required(names.rank, names, 0, job.size - 1);
  job.found = fmt::format("{}={}", names.size, job.size);
  job.local_rank = environment_int(names.local_rank);
  if (!job.local_rank && names.launcher == JobLauncher::kHydra) {
    job.local_rank = environment_int(kSlurm.local_rank); // srun --mpi=pmi2
  }
  return job;
}

// A batch script sees the size of its allocation, but is no rank.
Job job_of_slurm() {
  Names names = kSlurm;
  if (environment(kSlurmStepSize)) {
    names.size = kSlurmStepSize;
  } else if (
      !environment("SLURM_STEP_ID") && environment_int(kSlurm.size) != 1) {
    throw UsageError(fmt::format(
        "init: {}={} says that this is a job of Slurm, but no step of it: srun "
        "did not start this process; start the ranks by srun, or one rank by "
        "`tessera run -n 1`",
        kSlurm.size,
        environment(kSlurm.size).value_or("")));
  }
  return job_by(names);
}

bool any_set(const Names& names) {
  return environment(names.rank) || environment(names.size);
}

} // namespace

const char* name_of(JobLauncher launcher) {
  switch (launcher) {
    case JobLauncher::kTorchrun:
      return "torchrun";
    case JobLauncher::kOpenMpi:
      return "Open MPI's mpirun";
    case JobLauncher::kHydra:
      return "MPICH's mpiexec";
    case JobLauncher::kSlurm:
      return "srun";
  }
  return "?";
}

std::optional<Job> find_job() {
  for (const Names& names : {kTorchrun, kOpenMpi, kHydra}) {
    if (any_set(names)) {
      return job_by(names);
    }
  }
  // An interactive allocation has SLURM_NTASKS alone.
  if (environment(kSlurm.rank)) {
    return job_of_slurm();
  }
  return std::nullopt;
}

uint16_t checked_port(const std::string& name, int64_t value) {
  if (value < 1 || value > 65535) {
    throw UsageError(
        fmt::format("init: {}={}, expected 1 to 65535", name, value));
  }
  return static_cast<uint16_t>(value);
}

std::string first_slurm_host(const std::string& list) {
  const auto refuse = [&list](const char* what) {
    throw UsageError(fmt::format(
        "init: Slurm's node list '{}' {}; set MASTER_ADDR to the first host",
        list,
        what));
  };
  std::string host;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const std::size_t close = list.find(']', at);
    if (close == std::string::npos) {
      refuse("has a bracket that is not closed");
    }
    const std::size_t end = list.find_first_of(",-]", at);
    host += list.substr(at + 1, end - at - 1);
    at = close;
  }
  if (host.empty() || host.find(']') != std::string::npos) {
    refuse("names no host");
  }
  return host;
}

std::pair<std::string, uint16_t> slurm_rendezvous() {
  auto address = environment("MASTER_ADDR");
  if (!address) {
    auto list = environment("SLURM_STEP_NODELIST");
    list = list ? list : environment("SLURM_NODELIST");
    list = list ? list : environment("SLURM_JOB_NODELIST");
    if (!list) {
      throw UsageError(
          "init: srun started this, and neither SLURM_STEP_NODELIST nor "
          "SLURM_NODELIST says where rank 0 is; set MASTER_ADDR");
    }
    address = first_slurm_host(*list);
  }
  if (const auto port = environment_int("MASTER_PORT")) {
    return {*address, checked_port("MASTER_PORT", *port)};
  }
  // Below the ports that the system gives to outgoing connections.
  constexpr int64_t kFirst = 15'000;
  constexpr int64_t kCount = 15'000;
  constexpr int64_t kSpread = 7'919; // prime: jobs and their steps lie apart
  auto job = environment_int("SLURM_JOB_ID");
  job = job ? job : environment_int("SLURM_JOBID");
  auto step = environment_int("SLURM_STEP_ID");
  step = step ? step : environment_int("SLURM_STEPID");
  const int64_t mixed =
      std::max<int64_t>(job.value_or(0), 0) % kCount * kSpread +
      std::max<int64_t>(step.value_or(0), 0) % kCount;
  return {*address, static_cast<uint16_t>(kFirst + mixed % kCount)};
}

} // namespace tessera
