// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/cli/train_options.h>

namespace tessera::cli {

// Trains on this rank of a world that exists, and reports from rank 0. Returns
// the process's exit code: 0, or that of an interruption on rank 0.
// Collective over the world.
int train(const TrainPlan& plan);

} // namespace tessera::cli
