// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <tessera/comm/mpi/mpi_group.h>

#include <memory>

namespace tessera {

// A future of the operation's results. If it is not done yet, a thread that all
// groups of the process share moves it on; it starts with the first such
// operation and sleeps while there are none.
c10::intrusive_ptr<c10::ivalue::Future> follow_mpi_operation(
    std::shared_ptr<MpiGroup> group, MpiOperationPtr operation);

// Ends that thread; what it followed stays open. For the end of the process.
void stop_mpi_progress();

} // namespace tessera
