// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/devices.h>
#include <tessera/comm/run_ranks.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

c10::Device chosen(c10::DeviceType type, const DeviceSight& sight) {
  return device_of_rank("make_mesh [rank 5/8]", type, sight);
}

GpuCard card(std::string_view uuid, int64_t pid, std::string_view host) {
  GpuCard card{.pid = pid};
  std::ranges::copy(uuid, card.uuid.begin());
  std::ranges::copy(host, card.host.begin());
  return card;
}

TEST(Devices, ARankHasTheGpuOfItsNumberOrTheOnlyOne) {
  const c10::Device cuda3(c10::kCUDA, 3);
  const c10::Device cuda0(c10::kCUDA, 0);
  EXPECT_EQ(chosen(c10::kCUDA, {true, 8, 3}), cuda3);
  EXPECT_EQ(chosen(c10::kCUDA, {true, 4, 3}), cuda3);
  EXPECT_EQ(chosen(c10::kCUDA, {true, 1, 0}), cuda0);
  EXPECT_EQ(chosen(c10::kCUDA, {true, 1, 3}), cuda0); // the launcher's choice
  EXPECT_EQ(chosen(c10::kCPU, {false, 0, 3}), c10::Device(c10::kCPU));
}

TEST(Devices, NoGpuIsAnErrorThatSaysWhatToDo) {
  const auto error = [](c10::DeviceType type, const DeviceSight& sight) {
    return [=] { chosen(type, sight); };
  };
  EXPECT_THAT(
      error(c10::kCUDA, {false, 0, 0}),
      ThrowsMessage<UsageError>(AllOf(
          StartsWith("make_mesh [rank 5/8]: got device cuda"),
          HasSubstr(
              "built without CUDA; build against a libtorch with CUDA"))));
  EXPECT_THAT(
      error(c10::kCUDA, {true, 0, 0}),
      ThrowsMessage<UsageError>(
          AllOf(HasSubstr("sees no GPU"), HasSubstr("or use the CPU"))));
  EXPECT_THAT(
      error(c10::kCUDA, {true, 2, 2}),
      ThrowsMessage<UsageError>(AllOf(
          HasSubstr("rank 2 of its machine, whose GPUs are 2"),
          HasSubstr("start at most 2 ranks per machine"))));
  EXPECT_THAT(
      error(c10::kXPU, {true, 2, 0}),
      ThrowsMessage<UsageError>(
          HasSubstr("got device xpu, expected cpu or cuda")));
}

TEST(Devices, RanksThatShareAGpuAreRefused) {
  const auto check = [](const std::vector<GpuCard>& cards) {
    return [cards] { check_own_gpus("new_group [rank 0/3]", cards); };
  };
  EXPECT_NO_THROW(
      check({card("a", 1, "h"), card("b", 1, "h"), card("c", 2, "i")})());
  EXPECT_THAT(
      check({card("a", 1, "h"), card("b", 2, "h"), card("b", 3, "h")}),
      ThrowsMessage<UsageError>(AllOf(
          HasSubstr("ranks 1 and 2 share one GPU of host h"),
          HasSubstr("CUDA_VISIBLE_DEVICES"))));
  EXPECT_THAT(
      check({card("a", 7, "h"), card("b", 7, "h"), card("a", 7, "h")}),
      ThrowsMessage<UsageError>(AllOf(
          HasSubstr("ranks 0 and 2 share"),
          HasSubstr("ranks that are threads"))));
}

TEST(Devices, TheDeviceChoosesTheBackend) {
  for (const char* cpu : {"shm", "gloo", "mpi"}) {
    EXPECT_EQ(backend_on(c10::kCPU, cpu), cpu);
    EXPECT_EQ(backend_on(c10::kCUDA, cpu), "nccl");
  }
  EXPECT_THAT(
      [] { backend_on(c10::kXPU, "shm"); },
      ThrowsMessage<UsageError>(
          HasSubstr("device xpu, expected one of cpu, cuda")));
}

TEST(Devices, NcclIsNotABackendOfTheWorld) {
  EXPECT_NO_THROW(check_backend_name("init", "gloo"));
  EXPECT_THAT(
      [] { check_backend_name("init", "nccl"); },
      ThrowsMessage<UsageError>(AllOf(
          HasSubstr("backend 'nccl', expected one of shm, gloo, mpi"),
          HasSubstr("meshes on cuda have nccl by themselves"))));
}

// On a machine without a GPU, whatever libtorch was built with.
TEST(Devices, AGroupOnADeviceThatIsNotThereIsAnErrorOnEveryRank) {
  if (see_devices(c10::kCUDA, 0).count > 0) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  run_ranks(2, [](World world) {
    EXPECT_EQ(world.device(c10::kCPU), c10::Device(c10::kCPU));
    const std::vector<int64_t> both{0, 1};
    EXPECT_THAT(
        [&] { world.new_group(both, "dp", c10::kCUDA); },
        ThrowsMessage<UsageError>(HasSubstr("got device cuda")));
    const Group group = world.new_group(both, "dp"); // the world lives on
    group.barrier()->wait();
    EXPECT_EQ(group.device(), c10::Device(c10::kCPU));
  });
}

} // namespace
} // namespace tessera
