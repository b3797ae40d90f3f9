// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/placement.h>

#include <cstdint>
#include <vector>

namespace tessera {

// The global shape that the ranks' local shapes make up. Collective over the
// mesh: one small all_gather per axis. Throws UsageError, on every rank alike,
// when the locals differ in dtype or number of dims or fit no global shape
// under the placements.
std::vector<int64_t> infer_global_sizes(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placements& placements);

} // namespace tessera
