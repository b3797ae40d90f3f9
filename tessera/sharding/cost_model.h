// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/record.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

// What a collective of two ranks costs: latency_us + bytes of the full buffer /
// bandwidth, per kind. Alike on all ranks.
struct LinkCost {
  double latency_us = 0;
  double all_reduce_gb_s = 1; // full buffer bytes per second
  double reduce_scatter_gb_s = 1;
  double all_gather_gb_s = 1;
  double all_to_all_gb_s = 1;
};

// Prices what a redistribution does, so that rules and plans can be compared.
// Depends on what all ranks share only.
class CostModel {
 public:
  CostModel() = default;
  // The same costs on every axis, whatever its backend: measured ones.
  explicit CostModel(const LinkCost& every_link) : every_link_(every_link) {}

  // Constants by the backend's name ("shm", "gloo", "nccl", "single"; others
  // count as gloo), until costs are measured and agreed once per world.
  static const LinkCost& link_for(const std::string& backend_name);

  // Microseconds of one collective on an axis; `bytes` as in CollectiveEvent.
  // An axis of size 1 costs nothing. More ranks than two move 2(n-1)/n of the
  // bytes in log2(n) rounds.
  double collective_us(
      const DeviceMesh& mesh,
      int64_t axis,
      CollectiveKind kind,
      int64_t bytes) const;

  double copy_us(int64_t bytes) const; // a local pass over memory

 private:
  std::optional<LinkCost> every_link_;
};

} // namespace tessera
