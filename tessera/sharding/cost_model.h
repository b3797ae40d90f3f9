// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/record.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// What a collective costs on one mesh axis: latency_us + bytes of the full buffer / bandwidth, per kind. Alike on all ranks.
struct LinkCost {
  double latency_us = 10;
  double all_reduce_gb_s = 2; // full buffer bytes per second
  double reduce_scatter_gb_s = 2;
  double all_gather_gb_s = 2;
  double all_to_all_gb_s = 2;
};

class CostModel {
 public:
  // Constants by the backend's name ("shm", "gloo"), until costs are measured and agreed once per world.
  static LinkCost link_for(const std::string& backend_name);
  double collective_us(const DeviceMesh& mesh, int64_t axis, CollectiveKind kind, int64_t bytes) const;
  double copy_us(int64_t bytes) const; // a local pass over memory
};

} // namespace tessera
