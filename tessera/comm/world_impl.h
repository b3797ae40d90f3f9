// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group_impl.h>
#include <tessera/comm/rank_status.h>
#include <tessera/comm/world.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {

class MpiSession;
class PeerWatch;

// How one rank sees its job.
struct WorldSetup {
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;
  std::string backend; // see backends.h
  std::chrono::milliseconds timeout{}; // of one collective
  c10::intrusive_ptr<c10d::Store> store;
  bool one_host = true; // all ranks share this machine
  std::vector<int64_t> hosts =
      {}; // of each rank: the first rank on its machine
  bool by_host = false; // groups use the memory of each host where that helps
  bool debug_collectives = false;
  std::shared_ptr<RankStatus> status; // what a launcher sees; null without one
  std::shared_ptr<MpiSession> mpi = nullptr; // where MPI connects the ranks
};

// What a group's backend is made from.
struct GroupSetup {
  int64_t rank = 0; // inside the group
  std::vector<int64_t> world_ranks;
  std::string name;
  std::string id; // unlike any other group's of this world, alike on its ranks
  std::chrono::milliseconds timeout{};
  c10::intrusive_ptr<c10d::Store> store; // the group's own names
  bool one_host = true;
  std::shared_ptr<PeerWatch> peers; // all ranks of the world; may be null
  c10::Device device = c10::kCPU; // where the tensors lie
  // The same ranks' calls on the CPU; null where they are the group's own.
  std::shared_ptr<Collectives> host = nullptr;
  std::shared_ptr<Record> record = nullptr; // of the world

  int64_t size() const {
    return static_cast<int64_t>(world_ranks.size());
  }
};

class WorldImpl {
 public:
  explicit WorldImpl(WorldSetup setup);
  ~WorldImpl();
  WorldImpl(const WorldImpl&) = delete;
  WorldImpl& operator=(const WorldImpl&) = delete;

  const WorldSetup& setup() const {
    return setup_;
  }
  const Group& group() const {
    return world_group_;
  }
  Record& record() const {
    return *record_;
  }

  // See World.
  c10::Device device(const std::string& where, c10::DeviceType type) const;
  Group new_group(
      std::span<const int64_t> world_ranks,
      const std::string& name,
      c10::DeviceType device);
  void* state_slot(std::type_index type, std::shared_ptr<void> (*make)());

  // Makes every group of this world fail on the peers that wait for this rank.
  // Any thread.
  void abort(const std::string& reason);
  // Ends this rank's part in an orderly way: drops the rooms' state, then the
  // groups. Runs once; the destructor calls it.
  void close();

 private:
  std::shared_ptr<GroupImpl> make_group(
      std::vector<int64_t> world_ranks,
      const std::string& name,
      c10::Device device);
  struct Connection {
    std::string backend_name;
    std::unique_ptr<Collectives> collectives;
  };
  Connection connect(const GroupSetup& group) const;
  Connection connect_on_cpu(GroupSetup group) const;

  WorldSetup setup_;
  // Makes groups; empty in a world of one.
  std::function<std::unique_ptr<Collectives>(const GroupSetup&)> make_;
  std::shared_ptr<Record> record_ = std::make_shared<Record>();
  std::mutex groups_mutex_;
  std::map<std::string, int64_t> groups_made_; // by name and ranks
  std::vector<std::weak_ptr<GroupImpl>> groups_;
  std::shared_ptr<PeerWatch> peers_;
  Group world_group_;
  std::recursive_mutex state_mutex_; // recursive: a room's state may ask for
                                     // another's while it is made
  std::map<std::type_index, std::shared_ptr<void>> state_;
  std::vector<std::type_index> state_order_;
};

} // namespace tessera
