// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/comm/devices.h>
#include <tessera/comm/run_ranks.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/mesh/usage_error_of.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Sizes = std::vector<int64_t>;

TEST(ParseAxes, ReadsNamesAndSizes) {
  const std::vector<Axis> axes = parse_axes("dp=2,tp=-1");
  ASSERT_EQ(axes.size(), 2);
  EXPECT_EQ(axes[0].name, "dp");
  EXPECT_EQ(axes[0].size, 2);
  EXPECT_EQ(axes[1].name, "tp");
  EXPECT_EQ(axes[1].size, -1);
}

TEST(ParseAxes, NamesTheTextItCannotRead) {
  for (const char* text :
       {"dp", "dp=", "dp=x", "dp=2,", "dp=2x", "", "dp=99999999999999999999"}) {
    EXPECT_THAT(
        usage_error([&] { parse_axes(text); }), HasSubstr("not name=size"))
        << text;
  }
  EXPECT_THAT(usage_error([] { parse_axes("=2"); }), HasSubstr("has no name"));
  EXPECT_THAT(
      usage_error([] { parse_axes("a=2,a=2"); }),
      HasSubstr("names must differ"));
  EXPECT_THAT(
      usage_error([] { parse_axes("a=0"); }), HasSubstr("sizes start at 1"));
  EXPECT_THAT(
      usage_error([] { parse_axes("a=-1,b=-1"); }), HasSubstr("only one"));
}

TEST(DescribeMesh, SeesTheGridFromOneRank) {
  const DeviceMesh mesh = describe_mesh({{"a", 2}, {"b", 3}}, 5);
  EXPECT_THAT(mesh.coordinates(), ElementsAre(1, 2));
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.size(1), 3);
  EXPECT_EQ(mesh.axis_index("b"), 1);
  EXPECT_EQ(mesh.str(), "mesh(a=2, b=3)");
  EXPECT_THAT(
      usage_error([&] { (void)mesh.axis_index("c"); }),
      HasSubstr("its axes are a, b"));
  EXPECT_THAT(
      usage_error([&] { (void)mesh.world(); }), HasSubstr("only described"));
  EXPECT_THAT(
      usage_error([&] { (void)mesh.group(0); }), HasSubstr("only described"));
  EXPECT_THAT(
      usage_error([] {
        describe_mesh({{"a", 2}}, 2);
      }),
      HasSubstr("rank 2 of 2"));
}

class DeviceMeshRanks : public ::testing::TestWithParam<int64_t> {};

TEST_P(DeviceMeshRanks, OneAxisHoldsAllRanks) {
  run_ranks(GetParam(), [](const World& world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", -1}});
    EXPECT_EQ(mesh.size(0), world.size());
    EXPECT_EQ(mesh.coordinate(0), world.rank());
    EXPECT_EQ(mesh.group("dp").size(), world.size());
    EXPECT_EQ(mesh.group("dp").rank(), world.rank());
    EXPECT_EQ(mesh.group(0).name(), "dp");
    EXPECT_EQ(mesh.world(), world);
    EXPECT_EQ(mesh, make_mesh(world, {{"dp", world.size()}}));
    EXPECT_FALSE(mesh == make_mesh(world, {{"tp", world.size()}}));
    EXPECT_EQ(mesh, mesh.submesh({"dp"}));
  });
}

TEST_P(DeviceMeshRanks, AxisGroupsReduceOverTheirRanks) {
  run_ranks(GetParam(), [](const World& world) {
    const int64_t outer = world.size() % 2 == 0 ? 2 : 1;
    const DeviceMesh mesh = make_mesh(world, {{"a", outer}, {"b", -1}});
    const int64_t inner = world.size() / outer;
    auto a = torch::full({3}, world.rank(), torch::kLong);
    auto b = a.clone();
    mesh.group("a").all_reduce(a, ReduceOp::kSum)->wait();
    mesh.group("b").all_reduce(b, ReduceOp::kSum)->wait();
    int64_t along_a = 0;
    int64_t along_b = 0;
    for (int64_t i = 0; i < outer; ++i) {
      along_a += i * inner + mesh.coordinate(1);
    }
    for (int64_t i = 0; i < inner; ++i) {
      along_b += mesh.coordinate(0) * inner + i;
    }
    EXPECT_EQ(a[0].item<int64_t>(), along_a);
    EXPECT_EQ(b[0].item<int64_t>(), along_b);
  });
}

TEST_P(DeviceMeshRanks, RefusesSizesThatDoNotFit) {
  run_ranks(GetParam(), [](const World& world) {
    const std::string size = std::to_string(world.size());
    EXPECT_EQ(
        usage_error([&] {
          make_mesh(world, {{"dp", world.size()}, {"tp", 3}});
        }),
        "mesh dp=" + size + ",tp=3 needs " + std::to_string(3 * world.size()) +
            " ranks, world size is " + size + "; try dp=" + size + ",tp=1");
    EXPECT_THAT(
        usage_error([&] {
          make_mesh(world, {{"dp", 5}, {"tp", -1}});
        }),
        HasSubstr("needs a multiple of 5 ranks, world size is " + size));
    EXPECT_THAT(
        usage_error([&] {
          make_mesh(world, {{"a", 1}, {"a", -1}});
        }),
        HasSubstr("names must differ"));
    EXPECT_THAT(
        usage_error([&] { make_mesh(world, {}); }), HasSubstr("without axes"));
    const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
    EXPECT_THAT(
        usage_error([&] {
          make_mesh(world, {{"a", huge}, {"b", huge}});
        }),
        HasSubstr("world size"));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, DeviceMeshRanks, ::testing::Values(1, 2, 3, 4));

TEST(DeviceMesh, SubmeshFollowsTheOrderOfNamesAndSharesGroups) {
  run_ranks(4, [](const World& world) {
    const DeviceMesh mesh = make_mesh(world, {{"a", 2}, {"b", 2}});
    const DeviceMesh swapped = mesh.submesh({"b", "a"});
    EXPECT_THAT(swapped.ranks(), ElementsAre(0, 2, 1, 3));
    EXPECT_EQ(swapped.coordinate(0), mesh.coordinate(1));
    EXPECT_EQ(
        &swapped.group("a").world_ranks(), &mesh.group("a").world_ranks());
    EXPECT_EQ(swapped.submesh({"a", "b"}), mesh);
    const DeviceMesh row = mesh.submesh({"b"});
    const int64_t first = mesh.coordinate(0) * 2;
    EXPECT_THAT(row.ranks(), ElementsAre(first, first + 1));
    EXPECT_EQ(row.group(0).size(), 2);
    EXPECT_EQ(row, mesh.submesh({"b"}));
    EXPECT_THAT(
        usage_error([&] {
          mesh.submesh({"b", "b"});
        }),
        HasSubstr("names must differ"));
    EXPECT_THAT(
        usage_error([&] { mesh.submesh({"c"}); }), HasSubstr("its axes are"));
    EXPECT_THAT(
        usage_error([&] { mesh.submesh({}); }), HasSubstr("without axes"));
  });
}

TEST(DeviceMesh, KnowsTheBackendOfEveryAxis) {
  const auto check = [](const World& world) {
    const DeviceMesh mesh = make_mesh(world, {{"a", 1}, {"b", 2}});
    EXPECT_EQ(mesh.backend_name(0), "single");
    EXPECT_EQ(mesh.backend_name(1), mesh.group("b").backend_name());
    auto ones = torch::ones({2});
    mesh.group("b").all_reduce(ones, ReduceOp::kSum)->wait();
    EXPECT_EQ(ones[0].item<float>(), 2);
  };
  run_ranks(2, check);
  RunRanksOptions gloo;
  gloo.backend = "gloo";
  run_ranks(2, check, gloo);
}

TEST(DeviceMesh, LiesOnTheCpuUnlessToldOtherwise) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    EXPECT_EQ(mesh.device(), c10::Device(c10::kCPU));
    EXPECT_EQ(mesh.group("dp").device(), c10::Device(c10::kCPU));
  });
  const DeviceMesh imagined = describe_mesh({{"dp", 2}}, 0, "nccl", c10::kCUDA);
  EXPECT_EQ(imagined.device(), c10::Device(c10::kCUDA, 0));
}

TEST(DeviceMesh, OnGpusThatAreNotThereIsAnErrorAndTheWorldLivesOn) {
  if (see_devices(c10::kCUDA, 0).count > 0) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  run_ranks(2, [](World world) {
    EXPECT_THAT(
        usage_error([&] {
          make_mesh(world, {{"dp", 2}}, c10::kCUDA);
        }),
        HasSubstr("got device cuda"));
    EXPECT_THAT(
        usage_error([&] {
          make_mesh(world, {{"dp", 2}}, c10::kXPU);
        }),
        HasSubstr("expected cpu or cuda"));
    const DeviceMesh mesh = make_mesh(world, {{"dp", 2}});
    mesh.group("dp").barrier()->wait();
  });
}

TEST(DeviceMesh, StaysReadableWhenItsWorldHasEnded) {
  DeviceMesh mesh;
  SpecPtr spec = nullptr;
  run_ranks(1, [&](const World& world) {
    mesh = make_mesh(world, {{"dp", 1}});
    spec = intern_contiguous(mesh, {Shard(0)}, Sizes{4, 2}, c10::kFloat);
  });
  EXPECT_EQ(mesh.str(), "mesh(dp=1)");
  EXPECT_EQ(spec->local_sizes, (Sizes{4, 2}));
  EXPECT_EQ(with_placements(spec, {Shard(0)}), spec);
  EXPECT_THAT(
      usage_error([&] { (void)mesh.world(); }), HasSubstr("world has ended"));
}

} // namespace
} // namespace tessera
