// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

// What one rank sees of the devices of one type.
struct DeviceSight {
  bool built = false; // libtorch has code for the type
  int64_t count = 0; // devices that this process may use
  int64_t local_rank = 0;
};

// Whether libtorch has code for the type. Does not look for devices.
bool is_built_for(c10::DeviceType type);

// Asks libtorch. Nothing is started on the devices.
DeviceSight see_devices(c10::DeviceType type, int64_t local_rank);

// The device that is this rank's: the CPU, or the GPU of its local rank's
// number, or the only one that its process sees. `where` begins the message.
// Throws UsageError when there is none.
c10::Device device_of_rank(
    const std::string& where, c10::DeviceType type, const DeviceSight& sight);

// Makes the device the calling thread's current one; the CPU always is.
void make_current(c10::Device device);

// What a rank tells its group about the GPU that it will use.
struct GpuCard {
  std::array<char, 16> uuid{}; // of the GPU, or of its part
  int64_t pid = 0;
  std::array<char, 64> host{};
};

// NCCL wants a GPU for each rank, be the ranks processes or threads. cards[r]
// is rank r's. `where` begins the message. Throws UsageError that names the
// first two ranks that share one.
void check_own_gpus(const std::string& where, std::span<const GpuCard> cards);

} // namespace tessera
