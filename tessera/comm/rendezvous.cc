// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/rendezvous.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <vector>

namespace tessera {
namespace {

std::string arrival_key(const std::string& name, int64_t rank) {
  return fmt::format("{}/{}", name, rank);
}

} // namespace

std::string wait_for_key(
    c10d::Store& store,
    const std::string& key,
    std::chrono::milliseconds timeout) {
  try {
    store.wait({key}, timeout);
    return store.get_to_str(key);
  } catch (const std::exception& error) {
    throw TimeoutError(fmt::format(
        "rendezvous [{}]: no peer set it within {} ms; did a rank fail before "
        "it? ({})",
        key,
        timeout.count(),
        brief(error)));
  }
}

void meet_at_store(
    c10d::Store& store,
    const std::string& name,
    int64_t rank,
    int64_t size,
    std::chrono::milliseconds timeout) {
  store.set(arrival_key(name, rank), "1");
  std::vector<std::string> keys;
  for (int64_t peer = 0; peer < size; ++peer) {
    keys.push_back(arrival_key(name, peer));
  }
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::vector<int64_t> missing;
    for (int64_t peer = 0; peer < size; ++peer) {
      if (!store.check({arrival_key(name, peer)})) {
        missing.push_back(peer);
      }
    }
    throw TimeoutError(fmt::format(
        "rendezvous [{}, rank {}/{}]: ranks {} did not arrive within {} ms; "
        "look "
        "at their output ({})",
        name,
        rank,
        size,
        bracketed(missing),
        timeout.count(),
        brief(error)));
  }
}

std::string brief(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what()
                                : torch_error->what_without_backtrace();
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data()
                                                        : "unknown";
}

std::string machine_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> pid_namespace{};
  const auto length = readlink(
      "/proc/self/ns/pid", pid_namespace.data(), pid_namespace.size() - 1);
  return host_name() + "/" + boot + "/" +
      (length > 0 ? pid_namespace.data() : "");
}

} // namespace tessera
