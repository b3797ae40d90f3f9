// SPDX-License-Identifier: Apache-2.0
//
// For tests: operator calls carried out by decisions on plain tensors of all
// ranks in one thread, and compared with the plain call.
#pragma once

#include <tessera/sharding/propagate.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace tessera::simulation {

// A call of "aten::mm" and the like with the arguments of a world of one.
struct PlainCall {
  std::string op;
  std::vector<c10::IValue> args; // by schema position; shorter: defaults
};

// The arguments' count of tensors, lists element by element, absent ones too.
size_t tensor_count(const PlainCall& call);

// What rules see of the call when its tensors (in the order of
// Decision::inputs) have these placements on the mesh.
OpCall seen(
    const PlainCall& call,
    const DeviceMesh& mesh,
    const std::vector<Placements>& placements);

// The decision on every rank of a mesh with these axes, the local computations,
// and what they make up together. Adds test failures where ranks decide
// differently, or values, sizes, strides or written arguments are not those of
// the plain call. Returns rank 0's decision.
Decision check(
    const PlainCall& call,
    const std::vector<Axis>& axes,
    const std::vector<Placements>& placements);

// "[R, S0], [P]": placements that a decision wants, one per tensor.
std::string text(const std::vector<SpecPtr>& specs);

// The same of raw results.
std::string raw_text(const Decision& decision);

} // namespace tessera::simulation
