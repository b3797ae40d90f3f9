// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/optim/sharded_optimizer.h>

namespace tessera {

// The mode that the environment asks for, read anew at each call:
// FLAGS_fuse_allreduce_in_opt or FLAGS_fuse_reducescatter_in_opt is "True",
// "true" or "1"; kBucketed with neither. Throws UsageError with both.
GradientSync sync_from_environment();

} // namespace tessera
