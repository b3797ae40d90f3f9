// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Whether no element is infinite or NaN, of a flat tensor of float32, float64,
// bfloat16 or float16. One pass over memory that ends at the first block with
// such an element.
bool all_finite(const at::Tensor& flat);

} // namespace tessera
