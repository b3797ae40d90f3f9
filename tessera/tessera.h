// SPDX-License-Identifier: Apache-2.0
// Everything public.
#pragma once

#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/comm/world.h>
#include <tessera/dtensor/build.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/random.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/placement.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/optim/sharded_optimizer.h>
