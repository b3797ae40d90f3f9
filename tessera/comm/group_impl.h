// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/comm/group.h>
#include <tessera/comm/rank_status.h>
#include <tessera/comm/record.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class PeerWatch;

// What a Group handle points at. `collectives` is null for a group of one.
class GroupImpl {
 public:
  int64_t rank = 0; // inside the group
  std::vector<int64_t> world_ranks;
  std::string name;
  std::string backend_name;
  c10::Device device = c10::kCPU;
  std::shared_ptr<Record> record;
  uint32_t record_group = 0; // what the record calls this group
  std::shared_ptr<RankStatus> status; // null without a launcher
  std::shared_ptr<PeerWatch> peers; // may be null
  std::unique_ptr<Collectives> collectives;
};

// A Work that is done already.
WorkPtr done_work();

} // namespace tessera
