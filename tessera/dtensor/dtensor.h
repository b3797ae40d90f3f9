// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>

#include <iosfwd>
#include <optional>
#include <vector>

namespace tessera {

// A distributed tensor is an at::Tensor: global sizes outside, this rank's
// plain local tensor and a TensorSpec inside.

bool is_dtensor(const at::Tensor& tensor);

// The spec of a distributed tensor. Throws UsageError for a plain one.
SpecPtr spec_of(const at::Tensor& tensor);
const Placements& placements_of(const at::Tensor& tensor);

// This rank's local tensor itself, outside autograd: shares memory and version
// counter. Not collective.
const at::Tensor& local_of(const at::Tensor& tensor);

// This rank's local tensor, differentiable: its gradient is taken to have
// `grad_placements` (default: a Partial input's gradient is Replicate, others
// keep the input's placements). Not collective.
at::Tensor to_local(
    const at::Tensor& tensor,
    std::optional<Placements> grad_placements = std::nullopt);

// The whole value as a plain tensor on every rank, differentiable. Collective
// over the mesh. Throws TimeoutError, PeerError.
at::Tensor full_tensor(const at::Tensor& tensor);

struct DistributeOptions {
  // False: the value of the mesh's first rank goes to all. True: every rank's
  // own value is taken, and checked to be alike.
  bool own_value = false;
};

// Cuts a plain tensor of the global shape. Differentiable. Collective over the
// mesh.
at::Tensor distribute(
    const at::Tensor& value,
    const DeviceMesh& mesh,
    const Placements& placements,
    const DistributeOptions& options = {});

// Puts the ranks' local tensors together. Without `global_sizes` the local
// shapes are gathered (a small all_gather), the global shape is inferred and
// checked; with it the local shape is checked against it. Local shapes that fit
// no placement are a UsageError on every rank. Differentiable: the local
// gradient has the same placements, Partial becoming Replicate.
at::Tensor from_local(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placements& placements,
    std::optional<std::vector<int64_t>> global_sizes = std::nullopt);

// The same value with other placements on the same mesh. Differentiable: the
// gradient comes back in the input's placements, a Partial input's as
// Replicate. Collective over the mesh axes that change.
at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements);

// Wraps a local tensor that already has the shape the spec says, without checks
// and without autograd. For the library's own use.
at::Tensor wrap_local(at::Tensor local, SpecPtr spec);

// Prints spec and global value on the mesh's first rank. Collective over the
// mesh.
void print(const at::Tensor& tensor, std::ostream& out);
void print(const at::Tensor& tensor); // to standard output

} // namespace tessera
