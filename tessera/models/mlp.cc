// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/models/layers.h>
#include <tessera/models/mlp.h>

#include <cmath>
#include <string>

namespace tessera {

Mlp::Mlp(const std::vector<int64_t>& widths, double dropout)
    : dropout_(dropout) {
  if (widths.size() < 2) {
    throw UsageError(fmt::format(
        "Mlp: got {} widths, expected at least 2; give those of input and "
        "output",
        widths.size()));
  }
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    const LinearLayer::Options options{
        .std = std::sqrt(2.0 / static_cast<double>(widths[i])), .bias = true};
    const auto layer =
        std::make_shared<LinearLayer>(widths[i], widths[i + 1], options);
    layers_.push_back(register_module(std::to_string(i), layer));
  }
}

at::Tensor Mlp::forward(const at::Tensor& x) const {
  at::Tensor y = layers_.front()->forward(x);
  for (size_t i = 1; i < layers_.size(); ++i) {
    y = layers_[i]->forward(at::dropout(at::gelu(y), dropout_, is_training()));
  }
  return y;
}

} // namespace tessera
