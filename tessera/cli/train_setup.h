// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/cli/train_options.h>
#include <tessera/comm/world.h>
#include <tessera/mesh/device_mesh.h>

#include <string>

namespace tessera::cli {

struct TrainSetup {
  World world;
  DeviceMesh mesh;
};

// Joins the launcher's world, or makes a world of one, and lays the plan's mesh
// over it. Collective over the job.
TrainSetup enter_world(const TrainPlan& plan);

// What is about to be trained, for people: model, data, ranks.
std::string headline(const TrainPlan& plan, const TrainSetup& setup);

// The largest of the ranks' values, on every rank. Collective over the world.
// Not counted as part of any step.
double max_over_ranks(const World& world, double value);

} // namespace tessera::cli
