// SPDX-License-Identifier: Apache-2.0
#include <malloc.h>
#include <tessera/cli/memory_use.h>

#include <fstream>
#include <limits>
#include <string>
#include <string_view>

namespace tessera::cli {
namespace {

double status_mib(std::string_view field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with(field)) {
      return std::stod(line.substr(field.size())) / 1024; // "VmHWM:   12345 kB"
    }
  }
  return 0;
}

} // namespace

double resident_mib() {
  return status_mib("VmRSS:");
}

double peak_resident_mib() {
  return status_mib("VmHWM:");
}

bool reset_peak_resident() {
  ::malloc_trim(0);
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5" << std::flush; // proc(5): resets the peak resident set size
  return static_cast<bool>(clear);
}

void keep_freed_memory() {
  constexpr int kLargestMmapThreshold = 32 << 20; // that glibc accepts
  mallopt(M_MMAP_THRESHOLD, kLargestMmapThreshold);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, kLargestMmapThreshold);
}

} // namespace tessera::cli
