// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/clamp.h>
#include <tessera/optim/finite_check.h>
#include <tessera/optim/global_norm.h>
#include <tessera/optim/gradient_summary.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

namespace tessera {
namespace {

// A rank that has a gradient counts 1, one that has seen a bad element counts
// this, so that the sum and the maximum over ranks tell both.
constexpr double kNonfinite = 0x1p20;

bool is_limited(double limit) {
  return std::isfinite(limit);
}

// Of every bucket, the group of each slot; none for a parameter that the
// optimizer does not have.
using SlotGroups =
    std::unordered_map<const FlatBucket*, std::vector<std::optional<size_t>>>;

SlotGroups slot_groups(
    const GradientQuestion& question, std::span<const GradientPlace> places) {
  SlotGroups groups;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].bucket != nullptr) {
      auto& of_bucket = groups[places[i].bucket];
      of_bucket.resize(places[i].bucket->slots().size());
      of_bucket[places[i].slot] = question.groups[i];
    }
  }
  return groups;
}

void add_range(
    const FlatBucket& bucket,
    const FlatRange& range,
    double limit,
    NormSum& sum) {
  const at::Tensor values = bucket.reduced(range);
  sum.add(
      is_limited(limit) ? at::clamp(values.to(c10::kDouble), -limit, limit)
                        : values);
}

// Neighbours of one group at a time; padding is zero.
void add_bucket(
    const FlatBucket& bucket,
    const std::vector<std::optional<size_t>>& groups,
    const std::vector<double>& limits,
    std::vector<NormSum>& sums) {
  const auto& slots = bucket.slots();
  for (size_t first = 0; first < slots.size();) {
    size_t end = first + 1;
    while (end < slots.size() && groups[end] == groups[first]) {
      ++end;
    }
    const FlatRange range = intersect(
        {slots[first].range.begin, slots[end - 1].range.end}, bucket.part());
    if (groups[first] && range.size() > 0) {
      add_range(bucket, range, limits[*groups[first]], sums[*groups[first]]);
    }
    first = end;
  }
}

// On this rank, which gradients have an element that is not finite.
std::vector<bool> nonfinite_here(
    std::span<const std::unique_ptr<FlatBucket>> buckets,
    std::span<const GradientPlace> places) {
  std::vector<bool> nonfinite(places.size(), false);
  std::unordered_map<const FlatBucket*, bool> has;
  for (const auto& bucket : buckets) {
    has[bucket.get()] = !all_finite(bucket->reduced(bucket->part()));
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [bucket, slot] = places[i];
    if (bucket == nullptr || !has[bucket]) {
      continue;
    }
    const FlatRange range =
        intersect(bucket->slots()[slot].range, bucket->part());
    nonfinite[i] = range.size() > 0 && !all_finite(bucket->reduced(range));
  }
  return nonfinite;
}

// Of each group the norm's sum of powers, or maximum, on this rank.
std::vector<double> powers_here(
    const GradientQuestion& question,
    std::span<const std::unique_ptr<FlatBucket>> buckets,
    std::span<const GradientPlace> places) {
  std::vector<double> powers(question.limits.size(), 0);
  if (!question.norm_type) {
    return powers;
  }
  std::vector<NormSum> sums(powers.size(), NormSum(*question.norm_type));
  const SlotGroups groups = slot_groups(question, places);
  for (const auto& bucket : buckets) {
    const auto found = groups.find(bucket.get());
    if (found != groups.end() && bucket->kind().is_first_copy()) {
      add_bucket(*bucket, found->second, question.limits, sums);
    }
  }
  std::ranges::transform(sums, powers.begin(), &NormSum::value);
  return powers;
}

// Whether a norm's powers tell that all elements are finite, if they are: cut
// ones do not.
bool shows_nonfinite(const GradientQuestion& question) {
  return question.norm_type &&
      std::ranges::none_of(question.limits, is_limited);
}

bool needs_check(
    const GradientQuestion& question, const std::vector<double>& powers) {
  const bool suspicious = std::ranges::any_of(
      powers, [](double power) { return !std::isfinite(power); });
  return suspicious || (question.finite && !shows_nonfinite(question));
}

} // namespace

bool GradientSummary::answers(const GradientQuestion& other) const {
  if (other.finite && !question.finite) {
    return false;
  }
  return !other.norm_type ||
      (question.norm_type == other.norm_type &&
       question.limits == other.limits && question.groups == other.groups);
}

void summarize(
    const World& world,
    const GradientQuestion& question,
    std::span<const std::unique_ptr<FlatBucket>> buckets,
    std::span<const GradientPlace> places,
    const std::vector<bool>& present,
    bool changed,
    GradientSummary& summary) {
  const size_t count = places.size();
  std::vector<double> values = powers_here(question, buckets, places);
  const std::vector<bool> nonfinite = needs_check(question, values)
      ? nonfinite_here(buckets, places)
      : std::vector<bool>(count, false);
  for (size_t i = 0; i < count; ++i) {
    values.push_back((present[i] ? 1 : 0) + (nonfinite[i] ? kNonfinite : 0));
  }
  values.push_back(changed ? 1 : 0);
  const bool is_max = question.norm_type && std::isinf(*question.norm_type);
  if (count > 0) {
    all_reduce_values(world, values, is_max ? ReduceOp::kMax : ReduceOp::kSum);
  }
  const size_t groups = question.limits.size();
  summary.norms.assign(groups, 0);
  for (size_t i = 0; i < groups && question.norm_type; ++i) {
    summary.norms[i] = NormSum::norm_of(values[i], *question.norm_type);
  }
  summary.present.assign(count, false);
  summary.nonfinite.assign(count, false);
  for (size_t i = 0; i < count; ++i) {
    summary.present[i] = values[groups + i] > 0;
    summary.nonfinite[i] = values[groups + i] >= kNonfinite;
  }
  summary.reduction += values.back() > 0 ? 1 : 0;
  summary.question = question;
  summary.question.finite = question.finite || shows_nonfinite(question);
}

} // namespace tessera
