// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>

namespace tessera {

// The differentiable crossings between plain and distributed tensors. Each
// keeps to one rule: the gradient of a Partial tensor is Replicate, that of a
// Replicate one may stay Partial, that of a Shard is Shard.

// The local tensor of `tensor`; its gradient is taken to have the spec
// `gradient`.
at::Tensor to_local_function(const at::Tensor& tensor, SpecPtr gradient);
// `local` as a distributed tensor of the spec.
at::Tensor from_local_function(const at::Tensor& local, SpecPtr spec);
// `tensor` brought to the spec.
at::Tensor redistribute_function(const at::Tensor& tensor, SpecPtr to);
// `whole` (the agreed value of `value`) cut as the spec says; the gradient of
// `value` is the whole gradient.
at::Tensor distribute_function(
    const at::Tensor& value, const at::Tensor& whole, SpecPtr to);

// Makes gradients that reach `tensor` as a leaf come in its placements (a
// Partial sum stays where the tensor is Replicate). Once per tensor.
void prepare_leaf(const at::Tensor& tensor);

} // namespace tessera
