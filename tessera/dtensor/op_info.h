// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// What the dispatcher needs to know of an operator, read off its schema once.
struct OpInfo {
  enum class ArgKind : uint8_t {
    kTensor,
    kTensorList,
    kOptionalTensorList,
    kInt,
    kIntList,
    kBool,
    kBoolList,
    kReal,
    kScalar,
    kDtype,
    kString,
    kDevice,
    kOpaque
  };
  struct Arg {
    ArgKind kind;
    bool written; // the operator writes into it
    bool deciding; // a float whose value the rule may see
  };
  enum class ResultKind : uint8_t { kTensor, kTensorList, kOther };
  struct Result {
    ResultKind kind;
    int alias_of; // the written argument that is returned, or -1
  };

  explicit OpInfo(const c10::OperatorHandle& op);

  std::string name; // with overload
  std::vector<Arg> args;
  std::vector<Result> results;
  std::vector<int>
      tensor_args; // positions of every argument that may hold tensors
  std::vector<int> written_args;
  bool is_view = false; // a result aliases an argument that is not written
  bool writes_lists = false;
  bool is_random = false; // draws from a generator
  int generator_arg = -1; // where it can be given one
  bool is_inplace_view = false; // changes its argument's metadata
};

} // namespace tessera
