// SPDX-License-Identifier: Apache-2.0
// How a process finds its world: by the variables of what launched it, or by
// MPI. The ranks then meet at a store that rank 0 serves, see who shares a
// machine with whom, and make the group of all.
//
// torchrun says where the store is, and srun lets it be worked out. mpirun and
// mpiexec say nothing of the kind: there rank 0 takes a free port and the
// others learn of it through MPI. MPI itself is asked too, because a program
// that runs with another MPI library than its launcher's is, to that library, a
// world of one.
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/job.h>
#include <tessera/comm/mpi_loader.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/store.h>
#include <tessera/comm/world_impl.h>

#include <algorithm>
#include <map>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

std::string chosen_backend(const InitOptions& options) {
  std::string backend =
      environment("TESSERA_BACKEND").value_or(options.backend);
  if (backend != "auto") {
    check_backend_name("init (InitOptions, TESSERA_BACKEND)", backend);
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

bool by_mpi_launcher(const std::optional<Job>& job) {
  return job &&
      (job->launcher == JobLauncher::kOpenMpi ||
       job->launcher == JobLauncher::kHydra);
}

bool store_is_named() {
  return environment("MASTER_ADDR") && environment("MASTER_PORT");
}

bool wants_mpi(
    const InitOptions& options,
    const std::optional<Job>& job,
    const std::string& backend) {
  if (options.mpi_communicator || (job && job->size > 1 && backend == "mpi")) {
    return true;
  }
  if (job && job->launcher == JobLauncher::kTorchrun) {
    return false;
  }
  return program_runs_mpi() ||
      (by_mpi_launcher(job) && job->size > 1 && !store_is_named());
}

// What the variables say of the job must be what MPI says of it.
void check_against_mpi(const Job& job, const MpiSession& session) {
  if (job.size != session.job_size()) {
    throw UsageError(fmt::format(
        "init: {} set {}, but MPI_COMM_WORLD has {} here: the MPI library in "
        "this process is not the launcher's; start it by the mpirun or mpiexec "
        "of that library, or choose the plug-in by TESSERA_MPI_PLUGIN",
        name_of(job.launcher),
        job.found,
        session.job_size()));
  }
}

std::shared_ptr<MpiSession> open_session(
    const InitOptions& options, const std::optional<Job>& job) {
  auto session = open_mpi_session(
      {.communicator = options.mpi_communicator, .timeout = options.timeout});
  if (job) {
    check_against_mpi(*job, *session);
  }
  if (job && !options.mpi_communicator && job->rank != session->rank()) {
    throw UsageError(fmt::format(
        "init: {} made this rank {}, MPI made it rank {}; start it by one "
        "launcher",
        name_of(job->launcher),
        job->rank,
        session->rank()));
  }
  return session;
}

c10::intrusive_ptr<c10d::Store> store_at(
    StoreAddress address, bool serves, std::chrono::milliseconds timeout) {
  return serves ? serve_store(address, timeout) : join_store(address, timeout);
}

StoreAddress named_address() {
  const auto host = environment("MASTER_ADDR");
  const auto port = environment_int("MASTER_PORT");
  if (!host || !port) {
    throw UsageError(fmt::format(
        "init: {} is not set though RANK and WORLD_SIZE are; set all or none",
        host ? "MASTER_PORT" : "MASTER_ADDR"));
  }
  return {*host, checked_port("MASTER_PORT", *port)};
}

// Rank 0 takes a free port and tells the others, or why it could not.
c10::intrusive_ptr<c10d::Store> store_through_mpi(
    MpiSession& session, std::chrono::milliseconds timeout) {
  const auto machines = session.exchange(machine_identity());
  const bool one_host = std::all_of(
      machines.begin(), machines.end(), [&machines](const std::string& one) {
        return one == machines.front();
      });
  constexpr const char* kFailed = "!";
  c10::intrusive_ptr<c10d::Store> store;
  std::string told;
  if (session.rank() == 0) {
    try {
      StoreAddress address{environment("MASTER_ADDR")
                               .value_or(one_host ? kLoopback : own_address())};
      store = serve_store(address, timeout);
      told = fmt::format("{} {}", address.port, address.host);
    } catch (const std::exception& error) {
      told = kFailed + std::string(error.what());
    }
  }
  told = session.exchange(told).front();
  if (told.starts_with(kFailed)) {
    throw IoError(told.substr(1));
  }
  if (session.rank() != 0) {
    const auto space = told.find(' ');
    store = join_store(
        {told.substr(space + 1),
         checked_port("port of rank 0", std::stoll(told))},
        timeout);
  }
  return store;
}

c10::intrusive_ptr<c10d::Store> find_store(
    const WorldSetup& setup, const std::optional<Job>& job) {
  const bool first = setup.rank == 0;
  if (job && job->launcher == JobLauncher::kTorchrun && !setup.mpi) {
    // torchrun's agent may serve the store already.
    const bool agent_serves =
        environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
    return store_at(named_address(), first && !agent_serves, setup.timeout);
  }
  if (setup.mpi) {
    return store_through_mpi(*setup.mpi, setup.timeout);
  }
  if (job && job->launcher == JobLauncher::kSlurm) {
    const auto [host, port] = slurm_rendezvous();
    return store_at({host, port}, first, setup.timeout);
  }
  return store_at(named_address(), first, setup.timeout);
}

// Fills in what follows from who shares a machine with whom.
void place(WorldSetup& setup, const std::optional<Job>& job) {
  const auto key = [](int64_t rank) { return fmt::format("machine/{}", rank); };
  const std::string own = machine_identity();
  setup.store->set(key(setup.rank), own);
  meet_at_store(*setup.store, "init", setup.rank, setup.size, setup.timeout);
  int64_t before = 0;
  std::map<std::string, int64_t> first_on; // by machine
  for (int64_t peer = 0; peer < setup.size; ++peer) {
    const std::string machine = setup.store->get_to_str(key(peer));
    setup.hosts.push_back(first_on.emplace(machine, peer).first->second);
    before += machine == own && peer < setup.rank ? 1 : 0;
  }
  setup.one_host = first_on.size() == 1;
  setup.local_rank = job ? job->local_rank.value_or(before) : before;
}

void settle_backend(WorldSetup& setup, const std::optional<Job>& job) {
  if (setup.backend == "shm" && !setup.one_host) {
    throw UsageError(fmt::format(
        "init [rank {}/{}]: backend shm needs all ranks on one machine (one "
        "host and PID namespace), these are on several; use gloo, mpi or auto",
        setup.rank,
        setup.size));
  }
  if (setup.backend == "auto") {
    const bool mpi = setup.mpi &&
        (by_mpi_launcher(job) || !job); // a communicator without a launcher
    setup.backend = setup.one_host ? "shm" : mpi ? "mpi" : "gloo";
    setup.by_host = !setup.one_host;
  }
}

bool is_alone(const WorldSetup& setup, const std::optional<Job>& job) {
  const bool named = job && job->launcher == JobLauncher::kTorchrun;
  return setup.size == 1 && !named;
}

} // namespace

World init(const InitOptions& options) {
  WorldSetup setup;
  setup.debug_collectives = debug_collectives(options);
  setup.backend = chosen_backend(options);
  setup.timeout = options.timeout;
  const std::optional<Job> job = find_job();
  if (job) {
    setup.rank = job->rank;
    setup.size = job->size;
  }
  if (wants_mpi(options, job, setup.backend)) {
    setup.mpi = open_session(options, job);
    setup.rank = setup.mpi->rank();
    setup.size = setup.mpi->size();
  }
  if (is_alone(setup, job)) {
    setup.backend = "shm"; // a world of one uses none
    setup.store = c10::make_intrusive<c10d::HashStore>();
    return World(std::make_shared<WorldImpl>(std::move(setup)));
  }
  setup.status = find_rank_status(setup.rank, setup.size);
  const WaitMark mark(setup.status.get());
  if (setup.status) {
    setup.status->phase.store(RankPhase::kJoined);
  }
  setup.store = find_store(setup, job);
  place(setup, job);
  settle_backend(setup, job);
  return World(std::make_shared<WorldImpl>(setup));
}

} // namespace tessera
