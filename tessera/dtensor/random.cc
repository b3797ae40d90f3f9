// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/random.h>

#include <tessera/dtensor/random_stream.h>

namespace tessera {

void manual_seed(const World& world, uint64_t seed) {
  set_random_state(world, RandomState{seed, 0, 0});
}

RandomState random_state(const World& world) {
  RandomStream& stream = world.state<RandomStream>();
  std::lock_guard<std::mutex> lock(stream.mutex);
  return stream.state;
}

void set_random_state(const World& world, const RandomState& state) {
  RandomStream& stream = world.state<RandomStream>();
  std::lock_guard<std::mutex> lock(stream.mutex);
  stream.state = state;
}

RandomState draw(const World& world) {
  RandomStream& stream = world.state<RandomStream>();
  std::lock_guard<std::mutex> lock(stream.mutex);
  const RandomState drawn = stream.state;
  ++stream.state.count;
  return drawn;
}

} // namespace tessera
