// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/world_impl.h>

#include <memory>

namespace tessera {

// Collectives that compare every call with the peers' before `inner` runs it:
// the ranks exchange the call's header and counts in one all_gather of a fixed
// size, so a mismatch is a PeerError on every rank, and nothing was moved.
// After one the group is dead. A call blocks until all ranks have come to it.
// The exchange goes over the group's calls on the CPU where `inner` has a
// device (GroupSetup::host). Sends and receives are compared pair by pair, see
// debug_messages.h; their wait() blocks until the peer has called the other
// half.
std::unique_ptr<Collectives> make_debug_collectives(
    std::unique_ptr<Collectives> inner, const GroupSetup& setup);

} // namespace tessera
