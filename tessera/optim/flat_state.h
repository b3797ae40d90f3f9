// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/optim/flat_layout.h>

#include <cstdint>

namespace tessera {

// Between whole plain tensors and a rank's share of them: a range of the
// elements of its local tensor, in the order in which `like`, the parameter's
// local tensor, has them in memory.
struct ShareOf {
  SpecPtr spec; // of the local tensor
  at::Tensor like;
  FlatRange range;
};

// Copies this rank's share out of a whole tensor into `share`, which is flat.
// Not collective.
void copy_share(
    const ShareOf& place, const at::Tensor& whole, const at::Tensor& share);

// Puts the ranks' shares together; every rank gets the whole. `summed` are the
// placements under which local tensors that hold their shares, and zeros
// elsewhere, add up to the whole. Collective over the mesh.
at::Tensor whole_of(
    const ShareOf& place, const at::Tensor& share, const Placements& summed);

} // namespace tessera
