// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tessera {

// Wall time of one step on this rank. The first three exclude each other.
struct StepSeconds {
  double forward_backward = 0; // without the collectives inside
  double communication = 0; // blocked in collectives, wherever in the step
  double optimizer = 0; // clipping and update, without their collectives
  double total = 0; // with reading data
  double hidden = 0; // communication that went on beside the others
};

// What one training step did.
struct StepReport {
  int64_t step = 0; // from 1
  double loss = 0; // mean over the global batch, before the update
  double gradient_norm = 0; // global, before clipping; 0 without clipping
  double learning_rate = 0;
  int64_t tokens = 0; // of all ranks
  double loss_scale = 1; // of this step, with float16
  bool is_skipped = false; // gradients were not finite under that scale
  StepSeconds seconds;
};

} // namespace tessera
