// SPDX-License-Identifier: Apache-2.0
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/devices.h>
#include <torch/version.h>

#include <cstring>

namespace tessera {
namespace {

[[noreturn]] void throw_without_gpu(
    const std::string& where, const DeviceSight& sight) {
  if (!sight.built) {
    throw UsageError(fmt::format(
        "{}: got device cuda, but libtorch {} here is built without CUDA; "
        "build against a libtorch with CUDA, or use the CPU",
        where,
        TORCH_VERSION));
  }
  const auto visible = environment("CUDA_VISIBLE_DEVICES");
  throw UsageError(fmt::format(
      "{}: got device cuda, but this process sees no GPU ({}), expected one "
      "for each rank; run where `nvidia-smi` lists one, or use the CPU",
      where,
      visible ? "CUDA_VISIBLE_DEVICES=" + *visible
              : "CUDA_VISIBLE_DEVICES is not set"));
}

} // namespace

bool is_built_for(c10::DeviceType type) {
  return type == c10::kCPU ||
      (type == c10::kCUDA && at::detail::getCUDAHooks().isBuilt());
}

DeviceSight see_devices(c10::DeviceType type, int64_t local_rank) {
  DeviceSight sight{
      .built = is_built_for(type), .count = 0, .local_rank = local_rank};
  if (sight.built) {
    sight.count =
        type == c10::kCPU ? 1 : at::detail::getCUDAHooks().deviceCount();
  }
  return sight;
}

c10::Device device_of_rank(
    const std::string& where, c10::DeviceType type, const DeviceSight& sight) {
  if (type == c10::kCPU) {
    return c10::kCPU;
  }
  if (type != c10::kCUDA) {
    throw UsageError(fmt::format(
        "{}: got device {}, expected cpu or cuda",
        where,
        c10::DeviceTypeName(type, /*lower_case=*/true)));
  }
  if (!sight.built || sight.count == 0) {
    throw_without_gpu(where, sight);
  }
  if (sight.count > 1 && sight.local_rank >= sight.count) {
    throw UsageError(fmt::format(
        "{}: this is rank {} of its machine, whose GPUs are {}, expected one "
        "for each rank; start at most {} ranks per machine",
        where,
        sight.local_rank,
        sight.count,
        sight.count));
  }
  return {
      c10::kCUDA,
      static_cast<c10::DeviceIndex>(sight.count == 1 ? 0 : sight.local_rank)};
}

void make_current(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::getDeviceGuardImpl(device.type())->setDevice(device);
  }
}

void check_own_gpus(const std::string& where, std::span<const GpuCard> cards) {
  for (std::size_t second = 1; second < cards.size(); ++second) {
    for (std::size_t first = 0; first < second; ++first) {
      if (cards[first].uuid != cards[second].uuid) {
        continue;
      }
      const auto& host = cards[second].host;
      const bool threads = cards[first].pid == cards[second].pid;
      throw UsageError(fmt::format(
          "{}: ranks {} and {} share one GPU of host {}, expected one for each "
          "rank; {}",
          where,
          first,
          second,
          std::string_view(host.data(), strnlen(host.data(), host.size())),
          threads ? "ranks that are threads need as many GPUs, or the CPU"
                  : "start at most as many ranks per machine as it has GPUs, "
                    "and let each see its own (CUDA_VISIBLE_DEVICES)"));
    }
  }
}

} // namespace tessera
