// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/util/SmallVector.h>
#include <tessera/dtensor/exec_plan.h>
#include <tessera/dtensor/local_kernels.h>
#include <tessera/dtensor/op_info.h>

#include <vector>

namespace tessera {

// The distributed tensors behind the arguments that an operator writes; they
// are what it returns.
using WrittenTensors = c10::SmallVector<at::Tensor, 4>;

class OpKernel final : public c10::OperatorKernel {
 public:
  OpKernel(const c10::OperatorHandle& op, size_t index)
      : info_(op), index_(index), path_(path_of(info_)) {}

  void operator()(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      torch::jit::Stack* stack);

 private:
  enum class Path : uint8_t {
    kSimple, // tensors in, fresh tensors or views out
    kInplace, // one tensor written and returned
    kInplaceView, // changes metadata in place
    kGeneral
  };
  static Path path_of(const OpInfo& info);

  c10::IValue& argument(torch::jit::Stack& stack, int position) const {
    return stack
        [stack.size() - info_.args.size() + static_cast<size_t>(position)];
  }

  void run_simple(
      const c10::OperatorHandle& op,
      const ExecPlan& plan,
      torch::jit::Stack& stack) const;
  void run_inplace(
      const c10::OperatorHandle& op,
      const ExecPlan& plan,
      torch::jit::Stack& stack) const;
  void run_general(
      const c10::OperatorHandle& op,
      ExecPlan& plan,
      torch::jit::Stack& stack) const;
  void run_inplace_view(
      const c10::OperatorHandle& op, torch::jit::Stack& stack) const;

  at::Tensor view_base(torch::jit::Stack& stack) const;
  c10::DispatchKeySet put_locals(torch::jit::Stack& stack) const;
  void move_inputs(const ExecPlan& plan, torch::jit::Stack& stack) const;
  void edit_arguments(const ExecPlan& plan, torch::jit::Stack& stack) const {
    for (const auto& [position, value] : plan.edits) {
      argument(stack, position) = value;
    }
  }
  WrittenTensors take_written(torch::jit::Stack& stack) const;
  std::vector<at::Tensor> computed_locals(
      const ExecPlan& plan, torch::jit::Stack& stack) const;
  void finish_written(
      const ExecPlan& plan,
      const WrittenTensors& written,
      const std::vector<at::Tensor>& computed) const;
  std::vector<at::Tensor> finished_locals(
      ExecPlan& plan, torch::jit::Stack& stack, LocalCall& call) const;
  void put_results(
      torch::jit::Stack& stack,
      const WrittenTensors& written,
      const std::vector<at::Tensor>& wrapped) const;

  OpInfo info_;
  size_t index_;
  Path path_;
};

} // namespace tessera
