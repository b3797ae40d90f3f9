// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <tessera/dtensor/random.h>
#include <tessera/mesh/tensor_spec.h>

#include <memory>
#include <vector>

namespace tessera {

// A tensor that was constructed but does not exist yet: its spec and the
// in-place initialisers that will make its values. Shared by every handle
// (member, parameters(), data()) of the tensor. Used by the thread that
// constructs.
class DeferredInit {
 public:
  explicit DeferredInit(SpecPtr spec) : spec_(spec) {}

  SpecPtr spec() const {
    return spec_;
  }
  bool is_materialised() const {
    return local_.defined();
  }
  const at::Tensor& local() const {
    return local_;
  }

  // Remembers op(tensor, arguments...). `draw` is the random state that the
  // call would have met.
  void record(
      const c10::OperatorHandle& op,
      std::vector<c10::IValue> arguments,
      const RandomState& before);

  // Where the tensor will live; only before it exists.
  void place(const Placements& placements) {
    spec_ = with_placements(spec_, placements);
  }

  // Makes this rank's part and runs the initialisers on it. No-op when it
  // exists.
  void materialise();

  // An independent record with the same future value.
  std::shared_ptr<DeferredInit> clone() const;

 private:
  struct Initialiser {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments; // without self
    RandomState before;
  };

  SpecPtr spec_;
  std::vector<Initialiser> initialisers_;
  at::Tensor local_;
};

} // namespace tessera
