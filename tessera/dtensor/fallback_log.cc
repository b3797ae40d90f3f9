// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/fallback_log.h>

#include <spdlog/spdlog.h>
#include <tessera/dtensor/dispatch.h>

#include <mutex>

namespace tessera {
namespace {

struct FallbackLog {
  std::mutex mutex;
  std::map<std::string, int64_t> counts;
  std::map<std::string, bool> named;
};

} // namespace

void count_fallback(const ExecPlan& plan, const OpInfo& info) {
  FallbackLog& log = plan.mesh.world().state<FallbackLog>();
  std::lock_guard<std::mutex> lock(log.mutex);
  ++log.counts[info.name];
  bool& named = log.named[info.name];
  if (!named && plan.mesh.world().rank() == 0) {
    spdlog::warn(
        "{} has no sharding rule: it runs on inputs gathered to every rank, "
        "right but slow (named once; fallback_counts counts it). Where it "
        "costs too much, redistribute its inputs to Replicate once, or call it "
        "on to_local's parts; and report it",
        info.name);
  }
  named = true;
}

std::map<std::string, int64_t> fallback_counts(const World& world) {
  FallbackLog& log = world.state<FallbackLog>();
  std::lock_guard<std::mutex> lock(log.mutex);
  return log.counts;
}

void reset_fallback_counts(const World& world) {
  FallbackLog& log = world.state<FallbackLog>();
  std::lock_guard<std::mutex> lock(log.mutex);
  log.counts.clear();
}

} // namespace tessera
