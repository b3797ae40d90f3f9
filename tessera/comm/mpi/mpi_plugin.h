// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/plugin.h>
#include <tessera/comm/world_impl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// The border between the library, which knows no MPI, and the plug-in, which
// is built once for each MPI library: its types cross as the int of
// MPI_Comm_c2f.

struct MpiSessionOptions {
  // Of the ranks that make the world, MPI_COMM_WORLD by default. Duplicated;
  // the caller keeps it.
  std::optional<int> communicator = std::nullopt;
  std::chrono::milliseconds timeout{};
};

// MPI as one world uses it.
class MpiSession {
 public:
  MpiSession() = default;
  virtual ~MpiSession() = default;
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  virtual int64_t job_size() const = 0; // of MPI_COMM_WORLD

  // Every rank's text, by rank; at most 1,000 bytes each. Collective over the
  // session, blocks. Throws TimeoutError, PeerError.
  virtual std::vector<std::string> exchange(const std::string& own) = 0;

  // The world's ranks are this session's. See MakeCollectives.
  virtual std::unique_ptr<Collectives> make_group(const GroupSetup& setup) = 0;
};

// What the plug-in's entry, `tessera_mpi_plugin`, returns.
struct MpiPlugin {
  PluginHeader header;
  const char* library; // "openmpi", "mpich"
  // Initialises MPI unless the program has. Collective over the communicator.
  // Throws UsageError, PeerError.
  std::shared_ptr<MpiSession> (*open)(const MpiSessionOptions& options);
};

} // namespace tessera
