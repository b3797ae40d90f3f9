// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/op_call.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

// The local computation that stands in for the operator's own. The dtensor room
// implements each; kOp calls the operator itself on the locals, with the edits
// applied. The others are needed where a shard alone does not give its part of
// the result.
enum class LocalKernel : uint8_t {
  kOp,
  kMean, // aten::mean: sum, then division by `numbers[0]` (the global count);
         // `numbers[1]`: the position of the argument dims, which keepdim and
         // dtype follow; -1: none, dtype follows the tensor
  kDivide, // the operator itself, whose reduction an edit turned into a sum,
           // then division by `numbers[0]`: mse_loss and its backward, ...
  kView, // squeeze, _reshape_alias: the local input viewed with result 0's
         // local sizes, whatever the call's arguments say
  kMaximum, // amax, max over a dim that is cut: an empty local gives the least
            // value there is; `numbers[0]`: the position of the argument dims,
            // which keepdim follows; -1: none
  kMinimum, // likewise
  kNorm, // vector norm over cut dims: raw is the sum of |x|^p (or max, min);
         // finished with the root after the reduction; `numbers[0]`: the
         // position of p
  kNllLoss, // nll_loss_forward, whose mean over a cut batch an edit turned into
            // a sum: raw are weighted sum and total weight; finished by
            // division
  kZerosIfEmpty, // the operator itself, which fails on an operand without an
                 // element: a rank that has none of operand 0 gives zeros
  kRandom, // counter-based random numbers over the global element index:
           // dropout, bernoulli, uniform_, normal_, ...
  kFusedSdpChoice // which attention kernel; decided on the global shapes
};

// What one result is.
struct OutputDecision {
  Placements raw; // as the local computation leaves it
  Placements placements; // after the executor has redistributed raw (equal to
                         // raw unless the kernel has a finishing part)
  std::vector<int64_t> sizes; // global
  std::vector<int64_t> strides; // global; empty: contiguous
  // False: the local result tells the sizes, each time anew. `sizes` is then
  // empty (everything is replicated) or has -1 for the extents to be taken from
  // the local result.
  bool sizes_known = true;
};

// Replaces one integer, integer-list or boolean argument of the local call:
// view sizes, slice bounds, expand sizes.
struct ArgEdit {
  int64_t arg; // schema position
  std::vector<int64_t> ints; // one element for a kInt argument
  bool scalar = false; // the argument is a single int
};

// How a call runs: redistribute the inputs, edit the arguments, run the local
// computation, say what the results are. Depends only on the OpCall (global
// shapes and specs), so that all ranks decide alike; edits alone may hold this
// rank's local sizes.
struct Decision {
  // Target of every tensor in the call, flattened in schema order: one entry
  // for each kTensor argument, one for each element of a kTensorList; null for
  // absent ones. For a written argument: what it must be before the local
  // computation.
  std::vector<SpecPtr> inputs;
  // Placements that each written tensor has after the local computation
  // (parallel to `inputs`; null for those not written). The executor brings it
  // back to the placements it had when they differ.
  std::vector<SpecPtr> written;
  // Of results that are no written arguments; flattened, undefined ones
  // included. Empty in a fallback: all are replicated then.
  std::vector<OutputDecision> outputs;
  std::vector<ArgEdit> edits;
  LocalKernel kernel = LocalKernel::kOp;
  std::vector<int64_t> numbers; // what the kernel needs
  bool is_view = false; // the result aliases the input's memory as long as
                        // inputs[0] needs no redistribution
  bool fallback =
      false; // no rule: everything replicated, to be counted and named once
};

} // namespace tessera
