// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <tessera/dtensor/dtensor.h>

#include <iostream>

namespace tessera {

void print(const at::Tensor& tensor, std::ostream& out) {
  if (!is_dtensor(tensor)) {
    out << tensor << '\n';
    return;
  }
  at::NoGradGuard no_grad;
  const SpecPtr spec = spec_of(tensor);
  const at::Tensor whole = full_tensor(tensor);
  if (spec->mesh.world().rank() == spec->mesh.ranks().front()) {
    out << whole << '\n' << spec->str() << '\n';
  }
}

void print(const at::Tensor& tensor) {
  print(tensor, std::cout);
}

} // namespace tessera
