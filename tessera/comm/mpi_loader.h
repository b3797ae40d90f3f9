// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/mpi/mpi_plugin.h>

#include <memory>

namespace tessera {

// Whether this program itself has initialised MPI, as far as its symbols tell.
bool program_runs_mpi();

// Loads the plug-in for the MPI library at hand and opens a session. Which one:
// TESSERA_MPI_PLUGIN (a path, "openmpi" or "mpich"); else the MPI library that
// the program has loaded; else the one whose launcher's variables are set; else
// the first there is. Collective over the communicator; blocks. Throws
// UsageError when it is missing, PeerError.
std::shared_ptr<MpiSession> open_mpi_session(const MpiSessionOptions& options);

} // namespace tessera
