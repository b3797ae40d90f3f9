// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace tessera {

// Hears of gradients while a backward runs, on the thread that runs it.
class GradientListener {
 public:
  GradientListener() = default;
  GradientListener(const GradientListener&) = delete;
  GradientListener& operator=(const GradientListener&) = delete;
  virtual ~GradientListener() = default;

  // `parameter.grad()` is about to change.
  virtual void before_gradient(const at::Tensor& parameter) = 0;
  // Autograd has added to `parameter.grad()`; it may be replaced now.
  virtual void after_gradient(const at::Tensor& parameter) = 0;
};

// Makes the listener hear of a leaf's gradients for as long as it lives. A
// hook that the leaf has already runs first.
void listen_to_gradient(
    const at::Tensor& parameter, std::weak_ptr<GradientListener> listener);

} // namespace tessera
