// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/mesh/tensor_spec.h>
#include <tessera/sharding/redistribution.h>

#include <memory>
#include <vector>

namespace tessera {

// Moves a local tensor through the steps; blocks. Collective over the axes that
// the steps name. The result shares no memory with `local` unless `may_alias`
// is true and no step needs to write.
at::Tensor run_steps(
    const at::Tensor& local,
    const std::vector<RedistributionStep>& steps,
    bool may_alias = false);

// The same, with the result in `destination`, which may share memory with
// `local` (as the whole does with the part that was cut from it).
void run_steps_into(
    const at::Tensor& local,
    const std::vector<RedistributionStep>& steps,
    const at::Tensor& destination);

// A redistribution that has been started. Move-only; wait() once.
class PendingTensor {
 public:
  struct State;
  explicit PendingTensor(std::unique_ptr<State> state);
  PendingTensor(PendingTensor&&) noexcept;
  PendingTensor& operator=(PendingTensor&&) noexcept;
  ~PendingTensor();

  // Blocks until the tensor is there: a distributed tensor in the asked
  // placements. Throws TimeoutError, PeerError.
  at::Tensor wait();

 private:
  std::unique_ptr<State> state_;
};

// Starts to bring a distributed tensor to other placements, outside autograd:
// its first collective is in flight when this returns, further ones run in
// wait(). Several may be pending at once; every rank starts and waits for them
// in the same order.
PendingTensor redistribute_async(
    const at::Tensor& tensor, const Placements& placements);

} // namespace tessera
