// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/world.h>

#include <cstdint>

namespace tessera {

// Starts the world's stream of random numbers anew. Every rank calls it with
// the same seed; nothing is communicated. Default seed: 0. Random numbers
// depend on (seed, scope, count of draws in the scope, global element index),
// never on rank, thread or mesh.
void manual_seed(const World& world, uint64_t seed);

// Where the world's stream stands; set it to come back there (recomputation,
// checkpoints).
struct RandomState {
  uint64_t seed = 0;
  uint64_t scope = 0;
  uint64_t count = 0;
};
RandomState random_state(const World& world);
void set_random_state(const World& world, const RandomState& state);

} // namespace tessera
