// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/group.h>
#include <tessera/dtensor/redistribute.h>
#include <tessera/mesh/tensor_spec.h>

#include <optional>

namespace tessera {

// This rank's part of a parameter while it is updated: the part that its
// optimizer state belongs to. A view of the parameter's own memory where that
// is contiguous, so that updating it and gathering the others' parts in place
// is all that needs to be done.
class ParameterPart {
 public:
  // `part` is how the state is placed. Collective only if `part` is no cut of
  // the parameter's placements.
  ParameterPart(const at::Tensor& parameter, SpecPtr part);

  // Contiguous, to be updated in place.
  const at::Tensor& local() const {
    return local_;
  }

  // Brings the parameter back to its own placements with the updated values;
  // `finish_return` completes what `start_return` began. Collective over the
  // axes that differ.
  void start_return();
  void finish_return();

 private:
  at::Tensor parameter_;
  SpecPtr part_;
  at::Tensor local_;
  WorkPtr work_;
  std::optional<PendingTensor> pending_;
};

} // namespace tessera
