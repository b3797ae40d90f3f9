// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/sync_choice.h>

#include <cstdlib>
#include <string_view>

namespace tessera {
namespace {

constexpr const char* kAllReduceFlag = "FLAGS_fuse_allreduce_in_opt";
constexpr const char* kReduceScatterFlag = "FLAGS_fuse_reducescatter_in_opt";

bool is_on(const char* name) {
  const char* value = std::getenv(name);
  const std::string_view text = value == nullptr ? "" : value;
  return text == "True" || text == "true" || text == "1";
}

} // namespace

GradientSync sync_from_environment() {
  const bool all_reduce = is_on(kAllReduceFlag);
  const bool reduce_scatter = is_on(kReduceScatterFlag);
  if (all_reduce && reduce_scatter) {
    throw UsageError(fmt::format(
        "optimizer step [environment]: got both {} and {} on, expected one; "
        "unset one",
        kAllReduceFlag,
        kReduceScatterFlag));
  }
  if (all_reduce) {
    return GradientSync::kAllReduce;
  }
  return reduce_scatter ? GradientSync::kReduceScatter
                        : GradientSync::kBucketed;
}

} // namespace tessera
