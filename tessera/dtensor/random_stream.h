// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/dtensor/random.h>

#include <mutex>

namespace tessera {

// A world's stream of random numbers. Every rank draws in the same order, so
// the states stay alike without a word between them.
struct RandomStream {
  std::mutex mutex;
  RandomState state;
};

// Takes the next draw: its state identifies all numbers of one operator call.
RandomState draw(const World& world);

} // namespace tessera
