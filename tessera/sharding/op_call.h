// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/tensor_spec.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// One argument of an operator call as a rule may see it: what the decision
// cache's key holds, and nothing else.
struct OpArg {
  enum class Kind : uint8_t {
    kNone, // absent optional that is no tensor
    kTensor, // an absent optional tensor too: `tensor` is null
    kTensorList, // List of optional tensors too
    kInt, // int, SymInt, and enumerations such as a loss reduction
    kIntList,
    kBool,
    kBoolList, // as ints
    kReal, // float or Scalar; `known` tells whether the value may be seen
    kDtype, // ScalarType, layout or memory format, as int
    kString,
    kOpaque // devices, generators, ...
  };
  Kind kind = Kind::kNone;
  bool known = false; // kReal: the rule's table marks this argument as
                      // deciding, and `real` holds it
  bool written = false; // kTensor, kTensorList: the operator writes into it (in
                        // place, out=, fused updates)
  SpecPtr tensor = nullptr; // kTensor
  std::vector<SpecPtr> tensors; // kTensorList; null where an element is absent
  int64_t integer = 0; // kInt, kBool, kDtype
  double real = 0;
  std::vector<int64_t> ints; // kIntList, kBoolList
  std::string text;
};

// A call of one operator on tensors of one mesh. Plain tensors appear with a
// replicated spec.
struct OpCall {
  std::string op; // with overload: "aten::mm", "aten::sum.dim_IntList"
  DeviceMesh mesh;
  std::vector<OpArg> args; // by schema position
};

} // namespace tessera
