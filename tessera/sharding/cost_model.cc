// SPDX-License-Identifier: Apache-2.0
#include <tessera/sharding/cost_model.h>

#include <bit>

namespace tessera {

namespace {

// Of two ranks on one machine, from comm_bench. An all_reduce is a
// reduce_scatter and an all_gather over either backend.
constexpr LinkCost kShm{10, 2.4, 4.8, 4.8, 4.8};
constexpr LinkCost kGloo{150, 1.0, 2.0, 2.0, 2.0};
constexpr LinkCost kNccl{30, 50, 100, 100, 100}; // assumed: GPUs of one machine
constexpr LinkCost kSingle{0, 10, 10, 10, 10};

constexpr double kCopyLatencyUs = 1;
constexpr double kCopyGbS = 10;

double micros(int64_t bytes, double gb_s) {
  return static_cast<double>(bytes) / (gb_s * 1e3);
}

double bandwidth(const LinkCost& link, CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return link.all_reduce_gb_s;
    case CollectiveKind::kReduceScatter:
      return link.reduce_scatter_gb_s;
    case CollectiveKind::kAllGather:
    case CollectiveKind::kBroadcast:
      return link.all_gather_gb_s;
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv:
    case CollectiveKind::kBarrier:
    case CollectiveKind::kWithPeers:
      return link.all_to_all_gb_s;
  }
  return link.all_to_all_gb_s;
}

} // namespace

const LinkCost& CostModel::link_for(const std::string& backend_name) {
  if (backend_name == "shm") {
    return kShm;
  }
  if (backend_name == "nccl") {
    return kNccl;
  }
  return backend_name == "single" ? kSingle : kGloo;
}

double CostModel::collective_us(
    const DeviceMesh& mesh,
    int64_t axis,
    CollectiveKind kind,
    int64_t bytes) const {
  const int64_t ranks = mesh.size(axis);
  if (ranks == 1) {
    return 0;
  }
  const LinkCost& link =
      every_link_ ? *every_link_ : link_for(mesh.backend_name(axis));
  const auto rounds =
      static_cast<double>(std::bit_width(static_cast<uint64_t>(ranks - 1)));
  const double share =
      2 * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  return link.latency_us * rounds +
      share * micros(bytes, bandwidth(link, kind));
}

double CostModel::copy_us(int64_t bytes) const {
  return kCopyLatencyUs + micros(bytes, kCopyGbS);
}

} // namespace tessera
