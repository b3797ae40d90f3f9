// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/optim/sharded_optimizer.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

namespace tessera {

struct GradScalerOptions {
  double init_scale = 65536; // positive
  double growth_factor = 2; // above 1
  double backoff_factor = 0.5; // between 0 and 1
  int64_t growth_interval = 2000; // updates without a skipped step, to grow
  bool enabled = true; // false: scales by 1 and skips nothing
};

// What a program saves to go on with the same scale.
struct GradScalerState {
  double scale;
  int64_t growth_tracker; // updates since the scale changed
};

// Scales losses so that small gradients survive in float16, as
// torch.cuda.amp.GradScaler does (Micikevicius et al., "Mixed Precision
// Training", 2018). Dividing by the scale is a factor of the optimizer's pass
// over memory, and which ranks have seen an infinite or NaN gradient travels
// with the optimizer's one small all_reduce. So every rank skips the same
// steps, and every rank's scale stays alike.
//   scaler.scale(loss).backward();
//   scaler.unscale(optimizer);          // only before clipping
//   optimizer.clip_grad_norm(1.0);
//   scaler.step(optimizer);
//   scaler.update();
class GradScaler {
 public:
  // Throws UsageError for options out of range.
  explicit GradScaler(const GradScalerOptions& options = {});

  // The loss times the scale, at least in float32. Not collective.
  at::Tensor scale(const at::Tensor& loss) const;

  // From now to the end of the step, clipping sees the optimizer's gradients
  // divided by the scale. Once per optimizer and update; step does it where it
  // has not been done. Not collective. Throws UsageError for a second time, and
  // for optimizers other than kBucketed.
  void unscale(ShardedOptimizer& optimizer);

  // The optimizer's step, unless a gradient on any rank is infinite or NaN:
  // then parameters, states and counts of steps stay as they are on every rank.
  // Returns whether it stepped. Once per optimizer and update. Collective as
  // the optimizer's step.
  bool step(ShardedOptimizer& optimizer);

  // After all optimizers have stepped: a smaller scale if one of them skipped,
  // a larger one after growth_interval updates where none did; or `new_scale`.
  // Not collective. Throws UsageError before any step.
  void update(std::optional<double> new_scale = std::nullopt);

  double scale() const { // 1 if not enabled
    return options_.enabled ? scale_ : 1;
  }
  bool is_enabled() const {
    return options_.enabled;
  }

  GradScalerState state() const {
    return {scale_, growth_tracker_};
  }
  // Throws UsageError for a scale that is not positive.
  void load_state(const GradScalerState& state);

 private:
  enum class Stage : uint8_t { kUnscaled, kStepped };

  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
  bool skipped_ = false; // some optimizer, since the last update
  std::unordered_map<const ShardedOptimizer*, Stage> stages_;
};

} // namespace tessera
