// SPDX-License-Identifier: Apache-2.0
// For tests: plain tensors that are the same on every rank, and the mesh of
// most of them.
#pragma once

#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

namespace tessera::test_tensors {

// 0, 1, 2, ... as float32.
inline at::Tensor range(at::IntArrayRef sizes) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat)
      .view(sizes);
}

// Normal numbers.
inline at::Tensor seeded(at::IntArrayRef sizes, uint64_t seed = 7) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator);
}

// Numbers from 0.5 to 1.5, where every operator is smooth.
inline at::Tensor seeded_positive(at::IntArrayRef sizes, uint64_t seed = 7) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::rand(sizes, generator) + 0.5;
}

// All ranks of the world on one axis.
inline DeviceMesh line(const World& world) {
  return make_mesh(world, {{"dp", world.size()}});
}

} // namespace tessera::test_tensors
