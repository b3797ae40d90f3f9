// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/plugin.h>
#include <tessera/comm/world_impl.h>

#include <memory>

namespace tessera {

// The border between the library, which knows no CUDA, and the plug-in, which
// is built where libtorch has it. What its entry, `tessera_nccl_plugin`,
// returns.
struct NcclPlugin {
  PluginHeader header;
  // See MakeCollectives. setup.device is the rank's GPU, setup.host is there.
  // Throws UsageError when ranks share a GPU.
  std::unique_ptr<Collectives> (*make_group)(const GroupSetup& setup);
};

} // namespace tessera
