// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>

#include <cstdint>

namespace tessera {

// This rank's share of a tensor that lies in a flat buffer: a range of the
// elements of the rank's local tensor, counted in the order in which they lie
// in memory. The ranks of the sharding axis hold ranges that follow one
// another; some may be empty.
struct FlatShard {
  at::Tensor values; // flat, `end - begin` elements
  SpecPtr spec = nullptr; // of the parameter: global shape, local shape
  int64_t begin = 0;
  int64_t end = 0;
};

} // namespace tessera
