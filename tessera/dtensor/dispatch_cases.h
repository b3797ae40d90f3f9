// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/device_mesh.h>

#include <string>
#include <vector>

namespace tessera {

// One signature of an operator: its operands, plain locals or distributed.
struct DispatchOperands {
  at::Tensor x;
  at::Tensor y;
  at::Tensor z;
  int64_t rows = 0; // of x, for view
};

// One operator of the dispatch benchmark.
struct DispatchCase {
  std::string name;
  at::Tensor (*call)(const DispatchOperands&);
  bool writes; // in place: no operand requires grad
};

const std::vector<DispatchCase>& dispatch_cases();

// 16 signatures for the named operator: other shapes and mixed placements, none
// of which needs communication. `distributed` and `plain` hold the same local
// values.
struct DispatchSignatures {
  std::vector<DispatchOperands> plain;
  std::vector<DispatchOperands> distributed;
};
DispatchSignatures dispatch_signatures(
    const DispatchCase& which, const DeviceMesh& mesh, bool requires_grad);

} // namespace tessera
