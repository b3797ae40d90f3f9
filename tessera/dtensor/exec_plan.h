// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/stack.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/op_info.h>
#include <tessera/sharding/decision.h>
#include <tessera/sharding/redistribution.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {

// A decision made ready to run: what one signature of one operator does on this
// rank, with nothing left to look up.
struct ExecPlan {
  // One tensor of the call that must be moved first.
  struct Move {
    int arg; // schema position
    int element; // inside a list, or -1
    std::vector<RedistributionStep> steps;
    SpecPtr to;
  };
  // One written tensor that must be brought back to its own placements
  // afterwards.
  struct Return {
    int arg;
    int element;
    std::vector<RedistributionStep>
        steps; // from what the computation left to the tensor's own spec;
               // empty: copied as it is
    size_t written_index; // among all tensors that the call writes
  };
  struct Output {
    const DTensorPrototype* prototype =
        nullptr; // null: only the local result tells the spec, each time anew
    std::vector<RedistributionStep> steps; // from raw to the final placements
    Placements placements;
    std::vector<int64_t>
        sizes; // without a prototype: global, -1 where the local result tells;
               // empty: all as the local result
    bool relayout = false; // the local computation leaves another memory order
                           // than the spec says
  };

  DeviceMesh mesh;
  Decision decision; // kernel: kZerosIfEmpty only where it is empty
  std::vector<Move> moves;
  std::vector<Return> returns;
  std::vector<std::pair<int, c10::IValue>> edits;
  std::vector<Output> outputs;
  std::vector<int64_t> view_sizes; // LocalKernel::kView: this rank's
  bool outputs_ready =
      false; // filled after the first run, which tells the dtypes
  bool simple = false; // nothing to move, to bring back or to finish: run the
                       // operator on the locals; known after the first run
  bool copied_view =
      false; // a view that had to move its input: the result is no alias
};

// Decides the call on the stack. Throws UsageError.
std::unique_ptr<ExecPlan> make_plan(
    const OpInfo& info, const torch::jit::Stack& stack);

// Fills plan.outputs from the decision and the local results of the first run
// (flattened, undefined ones included).
void learn_outputs(
    ExecPlan& plan,
    const std::vector<at::Tensor>& local_results,
    bool are_views);

} // namespace tessera
