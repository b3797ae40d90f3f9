// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/optim/flat_bucket.h>
#include <tessera/optim/precision.h>
#include <tessera/optim/update_rule.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// What an optimizer keeps beside a bucket, of this rank's part: flat states,
// and the masters of parameters of 16 bits, whose float32 values the update
// works on. Masters begin as the parameters are when this is made.
class BucketState {
 public:
  // The bucket outlives it.
  BucketState(const FlatBucket& bucket, const Precision& precision);

  // The first `count` states, each as large as the part; zeros at first.
  std::span<const at::Tensor> states(size_t count);
  // Those that there are: none before an update of elements of this rank.
  std::span<const at::Tensor> states() const {
    return states_;
  }
  // Pointers to the states of a range of the part; `fields` are those of the
  // rule. With `fresh` they begin anew.
  std::array<void*, 3> state_pointers(
      const std::vector<StateField>& fields,
      const FlatRange& range,
      bool fresh);
  c10::ScalarType dtype() const { // of the states
    return dtype_;
  }

  // Undefined for parameters that need none.
  const at::Tensor& masters() const {
    return masters_;
  }
  float* master_pointer(const FlatRange& range) const; // null without

  // Before an update. Where a parameter is no longer its master rounded,
  // because the program has written to it, its value becomes the master. Free
  // while nobody has written to any since `note_parameters`.
  void follow_parameters();
  // The parameters are the masters, rounded.
  void note_parameters();
  // Masters were replaced.
  void note_masters() {
    version_ = -1;
  }

  int64_t state_bytes() const;
  int64_t master_bytes() const;

 private:
  int64_t parameter_version() const;

  const FlatBucket* bucket_;
  c10::ScalarType dtype_;
  std::vector<at::Tensor> states_;
  at::Tensor masters_;
  int64_t version_ = -1; // of all parameters together
};

} // namespace tessera
