// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/debug_collectives.h>
#include <tessera/comm/devices.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/record_impl.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/shm_backend.h>
#include <tessera/comm/two_level.h>
#include <tessera/comm/world_impl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <random>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera {

namespace {

// A name for this world that no other has, the same on all ranks.
std::string job_name(const WorldSetup& setup) {
  std::random_device random;
  std::string own = fmt::format("{:08x}{:08x}", random(), random());
  if (setup.size == 1) {
    return own;
  }
  try { // the first to come sets it
    const auto name = setup.store->compareSet(
        "job", {}, std::vector<uint8_t>(own.begin(), own.end()));
    const bool good = name.size() == own.size() &&
        std::ranges::all_of(name, [](uint8_t c) { return isxdigit(c) != 0; });
    return good ? std::string(name.begin(), name.end()) // it names files
                : throw IoError("\"job\" holds something else");
  } catch (const std::exception& error) {
    throw IoError(fmt::format(
        "init [rank {}/{}]: the store does not answer ({})",
        setup.rank,
        setup.size,
        brief(error)));
  }
}

} // namespace

WorldImpl::WorldImpl(WorldSetup setup) : setup_(std::move(setup)) {
  record_->impl().set_owner(
      {.job = job_name(setup_),
       .rank = setup_.rank,
       .size = setup_.size,
       .host = host_name(),
       .pid = getpid()});
  if (setup_.size > 1) {
    make_ = open_backend(setup_.backend, setup_);
  }
  // Ranks over shm see each other's end by themselves, but not on a device.
  const bool watched = setup_.backend != "shm" || is_built_for(c10::kCUDA);
  if (watched && setup_.size > 1) {
    peers_ = PeerWatch::open(
        {.store = setup_.store,
         .rank = setup_.rank,
         .size = setup_.size,
         .timeout = setup_.timeout,
         .machine = machine_identity()});
  }
  std::vector<int64_t> everyone(static_cast<std::size_t>(setup_.size));
  std::iota(everyone.begin(), everyone.end(), int64_t{0});
  world_group_ = new_group(everyone, "world", c10::kCPU);
}

WorldImpl::~WorldImpl() {
  close();
}

c10::Device WorldImpl::device(
    const std::string& where, c10::DeviceType type) const {
  return device_of_rank(where, type, see_devices(type, setup_.local_rank));
}

Group WorldImpl::new_group(
    std::span<const int64_t> world_ranks,
    const std::string& name,
    c10::DeviceType device) {
  const auto where = fmt::format(
      "new_group [rank {}/{}, group {}]", setup_.rank, setup_.size, name);
  const std::vector<int64_t> ranks(world_ranks.begin(), world_ranks.end());
  if (std::set<int64_t>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    throw UsageError(
        where + ": got ranks " + bracketed(ranks) +
        ", expected each rank once");
  }
  for (const int64_t rank : ranks) {
    if (rank < 0 || rank >= setup_.size) {
      throw UsageError(fmt::format(
          "{}: rank {} is not in the world of {}", where, rank, setup_.size));
    }
  }
  if (std::find(ranks.begin(), ranks.end(), setup_.rank) == ranks.end()) {
    throw UsageError(
        where + ": this rank is not among " + bracketed(ranks) +
        "; only the group's ranks call new_group");
  }
  auto impl = make_group(ranks, name, this->device(where, device));
  const std::scoped_lock lock(groups_mutex_);
  std::erase_if(groups_, [](const auto& group) { return group.expired(); });
  groups_.push_back(impl);
  return Group(std::move(impl));
}

std::shared_ptr<GroupImpl> WorldImpl::make_group(
    std::vector<int64_t> world_ranks,
    const std::string& name,
    c10::Device device) {
  auto impl = std::make_shared<GroupImpl>();
  impl->rank = std::find(world_ranks.begin(), world_ranks.end(), setup_.rank) -
      world_ranks.begin();
  impl->world_ranks = std::move(world_ranks);
  impl->name = name;
  impl->device = device;
  impl->record = record_;
  impl->status = setup_.status;
  impl->peers = peers_;
  if (impl->world_ranks.size() == 1) {
    impl->backend_name = "single";
    return impl;
  }
  std::string prefix = name + bracketed(impl->world_ranks);
  {
    const std::scoped_lock lock(groups_mutex_);
    prefix += fmt::format("#{}", groups_made_[prefix]++);
  }
  impl->record_group = record_->impl().add_group(
      {.id = prefix, .name = name, .world_ranks = impl->world_ranks});
  const GroupSetup group{
      .rank = impl->rank,
      .world_ranks = impl->world_ranks,
      .name = name,
      .id = prefix,
      .timeout = setup_.timeout,
      .store = c10::make_intrusive<c10d::PrefixStore>(prefix, setup_.store),
      .one_host = setup_.one_host,
      .peers = peers_,
      .device = device,
      .record = record_};
  auto [backend_name, collectives] = connect(group);
  impl->backend_name = std::move(backend_name);
  impl->collectives = std::move(collectives);
  return impl;
}

// A group on a device also has its ranks' calls on the CPU: for what its
// backend cannot do, and to compare calls before they go to the device.
WorldImpl::Connection WorldImpl::connect(const GroupSetup& group) const {
  GroupSetup setup = group;
  Connection connection;
  if (group.device.is_cpu()) {
    connection = connect_on_cpu(group);
  } else {
    connection.backend_name = backend_on(group.device.type(), setup_.backend);
    GroupSetup host = group;
    host.id += "/cpu";
    host.store = c10::make_intrusive<c10d::PrefixStore>("cpu", group.store);
    host.device = c10::kCPU;
    setup.host = connect_on_cpu(std::move(host)).collectives;
    connection.collectives =
        open_backend(connection.backend_name, setup_)(setup);
  }
  if (setup_.debug_collectives && connection.backend_name != "shm") {
    connection.collectives =
        make_debug_collectives(std::move(connection.collectives), setup);
  }
  return connection;
}

// Chooses the backend: that of the world, or, where the world spans hosts and
// the user left the choice, one that uses the memory of each host.
WorldImpl::Connection WorldImpl::connect_on_cpu(GroupSetup group) const {
  std::vector<int64_t> hosts;
  for (const int64_t rank : group.world_ranks) {
    hosts.push_back(
        setup_.by_host ? setup_.hosts[static_cast<std::size_t>(rank)] : 0);
  }
  const HostMap map(hosts);
  if (setup_.by_host && map.host_count() == 1) {
    group.one_host = true;
    return {"shm", make_shm_collectives(group)};
  }
  if (map.worth_it()) {
    return {
        "shm+" + setup_.backend,
        make_two_level_collectives(group, map, make_shm_collectives, make_)};
  }
  return {setup_.backend, make_(group)};
}

void* WorldImpl::state_slot(
    std::type_index type, std::shared_ptr<void> (*make)()) {
  const std::scoped_lock lock(state_mutex_);
  const auto found = state_.find(type);
  if (found != state_.end()) {
    return found->second.get();
  }
  auto made = make();
  state_order_.push_back(type);
  return state_.emplace(type, std::move(made)).first->second.get();
}

void WorldImpl::abort(const std::string& reason) {
  const std::scoped_lock lock(groups_mutex_);
  for (const auto& weak : groups_) {
    const auto group = weak.lock();
    if (group && group->collectives) {
      group->collectives->abort(reason);
    }
  }
}

void WorldImpl::close() {
  {
    const std::scoped_lock lock(state_mutex_);
    for (auto type = state_order_.rbegin(); type != state_order_.rend();
         ++type) {
      state_.erase(*type);
    }
    state_order_.clear();
  }
  if (peers_) {
    peers_->leave(); // before the connections close
  }
  world_group_ = Group();
  if (setup_.status) {
    setup_.status->phase.store(RankPhase::kLeft);
  }
  const std::scoped_lock lock(groups_mutex_);
  for (const auto& weak : groups_) { // those whose handles the user kept
    const auto group = weak.lock();
    if (group && group->collectives) {
      group->collectives->leave();
    }
  }
}

int64_t World::rank() const {
  return impl_->setup().rank;
}

int64_t World::size() const {
  return impl_->setup().size;
}

int64_t World::local_rank() const {
  return impl_->setup().local_rank;
}

const Group& World::group() const {
  return impl_->group();
}

Record& World::record() const {
  return impl_->record();
}

c10::intrusive_ptr<c10d::Store> World::store() const {
  return impl_->setup().store;
}

c10::Device World::device(c10::DeviceType type) const {
  return impl_->device(
      fmt::format("device [rank {}/{}]", rank(), size()), type);
}

Group World::new_group(
    std::span<const int64_t> world_ranks,
    const std::string& name,
    c10::DeviceType device) const {
  return impl_->new_group(world_ranks, name, device);
}

World World::unowned() const {
  return World(
      std::shared_ptr<WorldImpl>(std::shared_ptr<void>(), impl_.get()));
}

void* World::state_slot(
    std::type_index type, std::shared_ptr<void> (*make)()) const {
  return impl_->state_slot(type, make);
}

} // namespace tessera
