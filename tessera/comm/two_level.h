// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/world_impl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera {

// Which ranks of a group share a host. Hosts count in the order of their first
// rank, which is their leader.
class HostMap {
 public:
  // hosts[r]: any number that tells the hosts of the group's ranks apart.
  explicit HostMap(const std::vector<int64_t>& hosts);

  int64_t size() const {
    return static_cast<int64_t>(host_of_.size());
  }
  int64_t host_count() const {
    return static_cast<int64_t>(ranks_.size());
  }
  int64_t host_of(int64_t rank) const {
    return host_of_[static_cast<std::size_t>(rank)];
  }
  const std::vector<int64_t>& ranks_of(int64_t host) const {
    return ranks_[static_cast<std::size_t>(host)];
  }
  int64_t leader_of(int64_t rank) const {
    return ranks_of(host_of(rank)).front();
  }
  // Ranks host by host.
  std::vector<int64_t> host_order() const;
  // Two levels pay: more than one host, and one that has several ranks.
  bool worth_it() const {
    return host_count() > 1 && host_count() < size();
  }

 private:
  std::vector<int64_t> host_of_;
  std::vector<std::vector<int64_t>> ranks_;
};

using MakeGroup =
    std::function<std::unique_ptr<Collectives>(const GroupSetup& setup)>;

// Collectives of a group that spans hosts: all_reduce, reduce_scatter,
// all_gather, broadcast and barrier go through the memory of each host first,
// and one leader per host talks to the others, so that each element crosses the
// network once per host instead of once per rank. Other calls go directly.
// Blocking. Sums of bfloat16 and float16 stay in float32 between the levels.
// Collective over the group. Throws TimeoutError, IoError.
std::unique_ptr<Collectives> make_two_level_collectives(
    const GroupSetup& setup,
    const HostMap& hosts,
    const MakeGroup& make_local,
    const MakeGroup& make_remote);

} // namespace tessera
