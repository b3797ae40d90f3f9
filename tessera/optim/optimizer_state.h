// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace tessera {

// The name under which the float32 values of a 16-bit parameter are kept.
inline constexpr const char* kMasterWeight = "master_weight";

// What an optimizer keeps for one parameter, whole and plain.
struct ParameterState {
  int64_t steps = 0; // updates so far
  // By torch's names ("exp_avg", "momentum_buffer") or kMasterWeight, each of
  // the parameter's global shape. Without a master, where one is wanted, the
  // parameter's own value is.
  std::map<std::string, at::Tensor> tensors;
};

// By parameter name, as named_parameters() gives it. Says nothing of ranks,
// mode, stage or buckets. Parameters that were never updated are not in it.
using OptimizerState = std::map<std::string, ParameterState>;

} // namespace tessera
