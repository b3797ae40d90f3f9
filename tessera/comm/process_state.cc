// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sched.h>
#include <tessera/comm/process_state.h>

#include <fstream>
#include <string>

namespace tessera {

bool is_stopped(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  const auto end = text.rfind(") "); // the name before it may hold anything
  return end != std::string::npos && end + 2 < text.size() &&
      (text[end + 2] == 'T' || text[end + 2] == 't');
}

int64_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

} // namespace tessera
