// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/world.h>

#include <vector>

namespace tessera {

// torch's clip_grad_norm_ on the gradients as they are: each operator that
// reads a Partial gradient reduces it for itself. With parameters on one mesh
// over the whole world it is torch's function; otherwise each mesh's norm is
// computed that way and the norms are put together. Collective over the world.
// Blocks. Returns the norm before. Throws UsageError, TimeoutError, PeerError.
double clip_partial_gradients(
    const World& world,
    const std::vector<at::Tensor>& params,
    double max_norm,
    double norm_type);

// That norm alone. Collective over the world. Blocks.
double norm_of_partial_gradients(
    const World& world,
    const std::vector<at::Tensor>& params,
    double norm_type);

} // namespace tessera
