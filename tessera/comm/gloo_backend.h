// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/world_impl.h>

#include <memory>

namespace tessera {

// Collectives over libtorch's ProcessGroupGloo. Collective over the group;
// blocks until all are connected. Throws TimeoutError, PeerError.
std::unique_ptr<Collectives> make_gloo_collectives(const GroupSetup& setup);

} // namespace tessera
