// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DeviceType.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/world_impl.h>

#include <functional>
#include <memory>
#include <string>

namespace tessera {

// Makes one group's collectives. Collective over the group; blocks until all
// its ranks are connected. Throws TimeoutError, PeerError, IoError.
using MakeCollectives =
    std::function<std::unique_ptr<Collectives>(const GroupSetup& setup)>;

// What makes the groups of one world over the backend of that name. A backend
// that is a plug-in is loaded here. Throws UsageError for a name that is not
// known and for a backend that this world cannot have.
MakeCollectives open_backend(const std::string& name, const WorldSetup& world);

// The name of the backend that moves tensors on a device of that type, in a
// world whose ranks talk through `cpu_backend` on the CPU. Throws UsageError.
std::string backend_on(c10::DeviceType device, const std::string& cpu_backend);

// Throws UsageError that lists the known names unless `name` is one of those
// that a world can have on the CPU. `where` begins the message.
void check_backend_name(const std::string& where, const std::string& name);

} // namespace tessera
