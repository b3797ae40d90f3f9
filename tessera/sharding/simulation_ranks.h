// SPDX-License-Identifier: Apache-2.0
//
// For tests: what all ranks of a mesh hold of a value, and back.
#pragma once

#include <tessera/mesh/tensor_spec.h>
#include <torch/torch.h>

#include <vector>

namespace tessera::simulation {

using Locals = std::vector<at::Tensor>; // of all ranks, row-major

// What each rank holds of a value, by the axes from `axis` on. Partial means
// contributions that differ.
Locals cut(
    const DeviceMesh& mesh,
    const Placements& placements,
    const at::Tensor& value,
    int64_t axis = 0);

// The value that the ranks' tensors make up. Adds a test failure where replicas
// differ.
at::Tensor assemble(
    const DeviceMesh& mesh,
    const Placements& placements,
    const Locals& locals,
    int64_t axis = 0);

// What ranks' contributions reduce to.
at::Tensor reduced(const Locals& parts, ReduceOp op);

// Equal sizes, dtype and, within rounding, values.
bool same(const at::Tensor& a, const at::Tensor& b);

} // namespace tessera::simulation
