// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/world_impl.h>

#include <memory>

namespace tessera {

// Collectives over memory that the ranks of one machine share, whether they are
// processes or threads. See shm_backend.cc. Collective over the group; blocks
// until all have mapped the window. Throws TimeoutError, IoError.
std::unique_ptr<Collectives> make_shm_collectives(const GroupSetup& setup);

} // namespace tessera
