// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/conformance.h>
#include <tessera/comm/gloo_backend.h>
#include <tessera/comm/group_impl.h>
#include <tessera/comm/record_impl.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/comm/shm_backend.h>
#include <tessera/comm/two_level.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera {
namespace {

using conformance::Counts;
using testing::ElementsAre;

// The world's ranks as if they were on these hosts.
Group spread(const World& world, const Counts& hosts) {
  const GroupSetup setup{
      .rank = world.rank(),
      .world_ranks = world.group().world_ranks(),
      .name = "spread",
      .id = "spread",
      .timeout = world.impl()->setup().timeout,
      .store = c10::make_intrusive<c10d::PrefixStore>("spread", world.store()),
      .one_host = true,
      .peers = nullptr};
  auto impl = std::make_shared<GroupImpl>();
  impl->rank = setup.rank;
  impl->world_ranks = setup.world_ranks;
  impl->name = setup.name;
  impl->backend_name = "two-level";
  impl->record = std::make_shared<Record>();
  impl->record_group = impl->record->impl().add_group(
      {.id = setup.name, .name = setup.name, .world_ranks = setup.world_ranks});
  impl->collectives = make_two_level_collectives(
      setup, HostMap(hosts), make_shm_collectives, make_gloo_collectives);
  return Group(std::move(impl));
}

TEST(HostMap, LeadersAreTheFirstRanksOfTheirHosts) {
  const HostMap hosts({7, 3, 7, 3, 3});
  EXPECT_EQ(hosts.host_count(), 2);
  EXPECT_THAT(hosts.ranks_of(1), ElementsAre(1, 3, 4));
  EXPECT_EQ(hosts.leader_of(4), 1);
  EXPECT_THAT(hosts.host_order(), ElementsAre(0, 2, 1, 3, 4));
  EXPECT_TRUE(hosts.worth_it());
  EXPECT_FALSE(HostMap({1, 2, 3}).worth_it());
  EXPECT_FALSE(HostMap({1, 1}).worth_it());
}

class Spread : public testing::TestWithParam<Counts> {};

INSTANTIATE_TEST_SUITE_P(
    Hosts,
    Spread,
    testing::Values(
        Counts{0, 1},
        Counts{0, 0, 1},
        Counts{0, 1, 0},
        Counts{0, 0, 1, 1},
        Counts{0, 1, 0, 1},
        Counts{0, 1, 2, 1},
        Counts{0, 0, 0, 1, 1}));

TEST_P(Spread, CollectivesEqualThePlainModel) {
  const Counts hosts = GetParam();
  run_ranks(static_cast<int64_t>(hosts.size()), [&hosts](const World& world) {
    const Group group = spread(world, hosts);
    for (const at::ScalarType dtype : conformance::kDtypes) {
      for (const int64_t numel : {0, 1, 1000}) {
        conformance::check_movements(group, numel, dtype);
      }
    }
    for (const at::ScalarType dtype :
         {at::kInt, at::kByte, at::kBool, at::kLong}) {
      for (const ReduceOp op : conformance::kOps) {
        if (dtype != at::kBool || op != ReduceOp::kAvg) {
          conformance::check_reductions(group, 1001, dtype, op);
        }
      }
    }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      conformance::check_reductions(group, 7, at::kFloat, op);
      conformance::check_reductions(group, 7, at::kBFloat16, op);
    }
    conformance::check_all_to_all(group, 1000);
    conformance::check_ring(group);
    conformance::check_large(group);
    group.barrier()->wait();
  });
}

// Halves and quarters add up exactly in any order, so that rounding between
// the levels would show, and nothing else.
TEST_P(Spread, NarrowFloatsAreRoundedOnce) {
  const Counts hosts = GetParam();
  run_ranks(static_cast<int64_t>(hosts.size()), [&hosts](const World& world) {
    const Group group = spread(world, hosts);
    const at::Tensor own = at::full({100}, 257 + 2 * world.rank(), at::kFloat);
    at::Tensor sum = at::zeros({100});
    for (int64_t rank = 0; rank < world.size(); ++rank) {
      sum += at::full({100}, 257 + 2 * rank, at::kFloat).to(at::kBFloat16);
    }
    at::Tensor x = own.to(at::kBFloat16);
    group.all_reduce(x, ReduceOp::kSum)->wait();
    EXPECT_TRUE(at::equal(x, sum.to(at::kBFloat16)));
    x = own.to(at::kBFloat16);
    group.all_reduce(x, ReduceOp::kAvg)->wait();
    EXPECT_TRUE(at::equal(x, (sum / world.size()).to(at::kBFloat16)));
  });
}

// What a rank does in tests/hosts_test.py, whose hosts are network namespaces.
TEST(RankBody, DISABLED_OnHosts) {
  const World world = init();
  const Group& group = world.group();
  const bool several = world.size() > 2; // on at least one of the two hosts
  EXPECT_EQ(group.backend_name(), several ? "shm+gloo" : "gloo");
  for (const at::ScalarType dtype :
       {at::kInt, at::kByte, at::kBool, at::kLong}) {
    conformance::check_movements(group, 1001, dtype);
    conformance::check_reductions(group, 1001, dtype, ReduceOp::kSum);
    conformance::check_reductions(group, 1001, dtype, ReduceOp::kMax);
  }
  conformance::check_all_to_all(group, 1000);
  conformance::check_ring(group);
  conformance::check_large(group);
  group.barrier()->wait();
}

} // namespace
} // namespace tessera
