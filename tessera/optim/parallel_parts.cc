// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>
#include <tessera/optim/parallel_parts.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kPart = 4096;
constexpr int64_t kPartsPerThread = 8; // fewer are not worth a second one

} // namespace

void for_each_part(
    const void* memory,
    int64_t numel,
    c10::function_ref<void(int64_t begin, int64_t end)> body) {
  const int64_t parts = (numel + kPart - 1) / kPart;
  if (parts <= kPartsPerThread || at::get_num_threads() == 1) {
    body(0, numel);
    return;
  }
  // An iterator over one byte per part, none of which is read: libtorch
  // divides it over its threads.
  const auto* base = static_cast<const char*>(memory);
  at::Tensor bytes = at::from_blob(
      const_cast<char*>(base), {parts}, at::TensorOptions().dtype(c10::kByte));
  at::TensorIterator iterator = at::TensorIterator::nullary_op(bytes);
  iterator.for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t count, int64_t) {
        const int64_t first = data[0] - base;
        body(first * kPart, std::min(numel, (first + count) * kPart));
      },
      kPartsPerThread);
}

} // namespace tessera
