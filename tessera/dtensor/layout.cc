// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/layout.h>

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>

namespace tessera {
namespace {

// Strides of a dense tensor of the given sizes whose dims lie in the order of
// `like`, largest stride first.
std::vector<int64_t> dense_strides(
    c10::IntArrayRef sizes, c10::IntArrayRef like) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return like[a] > like[b];
  });
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[*dim] = next;
    next *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

} // namespace

at::Tensor empty_local(SpecPtr spec, const at::TensorOptions& options) {
  return at::empty_strided(
      spec->local_sizes,
      dense_strides(spec->local_sizes, spec->strides),
      options.dtype(spec->dtype));
}

bool layout_matches(const at::Tensor& local, SpecPtr spec) {
  if (local.numel() == 0) {
    return true;
  }
  const std::vector<int64_t> expected =
      dense_strides(local.sizes(), spec->strides);
  for (size_t d = 0; d < expected.size(); ++d) {
    if (local.sizes()[d] > 1 && local.strides()[d] != expected[d]) {
      return false;
    }
  }
  return true;
}

at::Tensor match_layout(const at::Tensor& local, SpecPtr spec) {
  if (layout_matches(local, spec)) {
    return local;
  }
  at::Tensor result = empty_local(spec, local.options());
  result.copy_(local);
  return result;
}

} // namespace tessera
