// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/precision.h>

namespace tessera {
namespace {

bool is_narrow(c10::ScalarType dtype) {
  return dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

// Keeps the streams of buckets apart: 2^64 over the golden ratio.
constexpr uint64_t kSeedStride = 0x9e3779b97f4a7c15;

} // namespace

Precision::Precision(const ShardOptions& options)
    : narrow_update_(options.narrow_update),
      seed_(options.rounding_seed),
      reduce_dtype_(options.reduce_dtype) {
  if (reduce_dtype_ && !is_narrow(*reduce_dtype_) &&
      *reduce_dtype_ != c10::kFloat && *reduce_dtype_ != c10::kDouble) {
    throw UsageError(fmt::format(
        "shard_optimizer: got reduce_dtype {}, expected float32, float64, "
        "bfloat16 or float16; leave it out for the default",
        c10::toString(*reduce_dtype_)));
  }
}

c10::ScalarType Precision::gradient_dtype(c10::ScalarType parameter) const {
  return reduce_dtype_.value_or(is_narrow(parameter) ? c10::kFloat : parameter);
}

c10::ScalarType Precision::state_dtype(c10::ScalarType parameter) const {
  return is_narrow(parameter) && narrow_update_ != NarrowUpdate::kNearest
      ? c10::kFloat
      : parameter;
}

bool Precision::has_master(c10::ScalarType parameter) const {
  return is_narrow(parameter) && narrow_update_ == NarrowUpdate::kMasterWeights;
}

std::optional<uint64_t> Precision::rounding_seed(
    c10::ScalarType parameter, uint64_t bucket) const {
  if (!is_narrow(parameter) ||
      narrow_update_ != NarrowUpdate::kStochasticRounding) {
    return std::nullopt;
  }
  return seed_ + kSeedStride * (bucket + 1);
}

} // namespace tessera
