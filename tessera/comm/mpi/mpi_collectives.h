// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/mpi/mpi_group.h>

#include <memory>

namespace tessera {

// See mpi_collectives.cc.
std::unique_ptr<Collectives> make_mpi_collectives(
    std::shared_ptr<MpiGroup> group);

} // namespace tessera
