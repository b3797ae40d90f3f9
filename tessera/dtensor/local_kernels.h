// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <tessera/dtensor/exec_plan.h>
#include <tessera/dtensor/op_info.h>

namespace tessera {

// The local computations that stand in for an operator's own (see LocalKernel).
// A kernel takes the arguments off the stack and leaves the results, as the
// operator would.
struct LocalCall {
  const c10::OperatorHandle& op;
  const OpInfo& info;
  c10::DispatchKeySet keys; // for redispatching to the locals' backend
  const ExecPlan& plan;
  double norm_order =
      2; // kNorm: left by the computation for the finishing part
};
void run_local_kernel(LocalCall& call, torch::jit::Stack& stack);

// What is left to do once raw results have been reduced: roots and divisions.
void finish_results(const LocalCall& call, std::vector<at::Tensor>& results);

} // namespace tessera
