// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/stack.h>
#include <tessera/dtensor/op_info.h>
#include <tessera/mesh/device_mesh.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tessera {

// The signature of one call as machine words: everything that a decision may
// depend on, exactly (no hash stands for a value).
class CallKey {
 public:
  // Reads the last `info.args.size()` values of the stack.
  CallKey(const OpInfo& info, const torch::jit::Stack& stack);

  const uint64_t* words() const {
    return size_ <= kInline ? inline_ : heap_.data();
  }
  size_t size() const {
    return size_;
  }
  uint64_t hash() const {
    return hash_;
  }

 private:
  static constexpr size_t kInline = 48;

  void push(uint64_t word) {
    if (C10_LIKELY(size_ < kInline)) {
      inline_[size_] = word;
    } else {
      push_heap(word);
    }
    ++size_;
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15ULL;
    hash_ ^= hash_ >> 29;
  }
  void push_heap(uint64_t word);
  void push_tensor(const at::TensorBase& tensor);
  void push_plain(const at::TensorBase& tensor);
  void push_argument(const OpInfo::Arg& arg, const c10::IValue& value);
  void push_list(const OpInfo::Arg& arg, const c10::IValue& value);
  void push_number(const OpInfo::Arg& arg, const c10::IValue& value);
  void push_text(const std::string& text);

  size_t size_ = 0;
  uint64_t hash_ = 0x51ed270b9f5c3d17ULL;
  uint64_t inline_[kInline];
  std::vector<uint64_t> heap_;
};

// The mesh of the call's distributed tensors. Throws UsageError when they live
// on meshes that do not fit together.
DeviceMesh mesh_of_call(const OpInfo& info, const torch::jit::Stack& stack);

} // namespace tessera
