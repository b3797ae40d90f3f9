// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>

namespace tessera {

// A local tensor lies in memory in the dim order that the spec's global strides
// say, so that what is a view globally is one locally.

// A fresh, dense, uninitialised local tensor for the spec.
at::Tensor empty_local(SpecPtr spec, const at::TensorOptions& options);

// Whether the tensor is dense in the spec's dim order; extents of one or none
// do not count.
bool layout_matches(const at::Tensor& local, SpecPtr spec);

// The tensor itself, or a dense copy in the spec's dim order.
at::Tensor match_layout(const at::Tensor& local, SpecPtr spec);

} // namespace tessera
