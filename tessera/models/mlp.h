// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera {

class LinearLayer;

// Linear layers with biases and GELU between them: the smallest model worth
// training. Parameters are "0.weight", "0.bias", "1.weight", ...
class Mlp : public torch::nn::Module {
 public:
  // `widths` are those of input, hidden layers and output: at least two.
  // `dropout` follows every hidden layer. Throws UsageError.
  explicit Mlp(const std::vector<int64_t>& widths, double dropout = 0);

  // [batch, widths.front()] -> [batch, widths.back()].
  at::Tensor forward(const at::Tensor& x) const;

 private:
  double dropout_;
  std::vector<std::shared_ptr<LinearLayer>> layers_;
};

} // namespace tessera
