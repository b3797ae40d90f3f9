// SPDX-License-Identifier: Apache-2.0
// Everything public but the models and their data.
#pragma once

#include <tessera/base/error.h>
#include <tessera/comm/record.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/comm/world.h>
#include <tessera/dtensor/build.h>
#include <tessera/dtensor/dispatch.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/random.h>
#include <tessera/dtensor/redistribute.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/placement.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/optim/grad_scaler.h>
#include <tessera/optim/gradient_placements.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/sharded_optimizer.h>
