// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <mutex>
#include <string>

namespace tessera {

// MPI as this process runs it. See mpi_runtime.cc for who initialises and ends
// it, and for its threads.

// While one lives, this thread may call MPI. Throws UsageError on a thread that
// may not at all.
class MpiTurn {
 public:
  MpiTurn();

 private:
  std::unique_lock<std::timed_mutex> lock_;
};

// Initialises MPI, unless somebody has. Throws UsageError.
void start_mpi();
// Whether MPI may still be called.
bool mpi_is_running();
// Whether only the thread that initialised MPI may call it.
bool mpi_has_one_thread();

// Frees it, for destructors. On a thread that may not call MPI it stays until
// MPI ends.
void free_communicator(MPI_Comm& communicator) noexcept;

// Worlds that are open count when the process ends. Called when one opens and
// closes.
void count_mpi_session(int change);

// Throws PeerError with MPI's own words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const std::string& where);
std::string mpi_error_text(int code);

} // namespace tessera
