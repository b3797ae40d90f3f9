// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/mul.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/grad_scaler.h>

#include <cmath>
#include <utility>

namespace tessera {
namespace {

bool is_positive(double value) {
  return std::isfinite(value) && value > 0;
}

void require_scale(double scale) {
  if (!is_positive(scale)) {
    throw UsageError(fmt::format(
        "GradScaler: got the scale {}, expected a positive number; the usual "
        "one is 65536",
        scale));
  }
}

void require_valid(const GradScalerOptions& options) {
  require_scale(options.init_scale);
  if (!(options.growth_factor > 1) || !(options.backoff_factor > 0) ||
      !(options.backoff_factor < 1) || options.growth_interval < 1) {
    throw UsageError(fmt::format(
        "GradScaler: got growth_factor {}, backoff_factor {} and "
        "growth_interval {}, expected one above 1, one between 0 and 1, and a "
        "positive number; the usual ones are 2, 0.5 and 2000",
        options.growth_factor,
        options.backoff_factor,
        options.growth_interval));
  }
}

} // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(options.init_scale) {
  require_valid(options);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) {
    return loss;
  }
  const bool is_narrow =
      loss.scalar_type() == c10::kHalf || loss.scalar_type() == c10::kBFloat16;
  return (is_narrow ? loss.to(c10::kFloat) : loss) * scale_;
}

void GradScaler::unscale(ShardedOptimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  if (!stages_.emplace(&optimizer, Stage::kUnscaled).second) {
    throw UsageError(
        "GradScaler::unscale: got an optimizer that was unscaled or stepped "
        "since the last update, expected once; call update after step");
  }
  optimizer.unscale(scale_);
}

bool GradScaler::step(ShardedOptimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  const auto stage = stages_.find(&optimizer);
  if (stage == stages_.end()) {
    unscale(optimizer);
  } else if (stage->second == Stage::kStepped) {
    throw UsageError(
        "GradScaler::step: got an optimizer that has stepped since the last "
        "update, expected once; call update after step");
  }
  stages_[&optimizer] = Stage::kStepped;
  const bool stepped = optimizer.step_if_finite();
  skipped_ = skipped_ || !stepped;
  return stepped;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  if (new_scale) {
    require_scale(*new_scale);
    scale_ = *new_scale;
  } else if (stages_.empty()) {
    throw UsageError(
        "GradScaler::update: got no step since the last update, expected one; "
        "call step first");
  } else if (skipped_) {
    scale_ *= options_.backoff_factor;
    growth_tracker_ = 0;
  } else if (++growth_tracker_ == options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    // Gradients of float32 would be infinite beyond.
    scale_ = std::isfinite(static_cast<float>(grown)) ? grown : scale_;
    growth_tracker_ = 0;
  }
  skipped_ = false;
  stages_.clear();
}

void GradScaler::load_state(const GradScalerState& state) {
  require_scale(state.scale);
  scale_ = state.scale;
  growth_tracker_ = state.growth_tracker;
}

} // namespace tessera
