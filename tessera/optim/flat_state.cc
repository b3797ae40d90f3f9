// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/flat_state.h>

namespace tessera {
namespace {

// Uninitialised, laid out as the parameter's local tensor.
at::Tensor laid_out(const ShareOf& place, const at::TensorOptions& options) {
  const at::TensorOptions plain = options.requires_grad(false);
  return place.like.is_non_overlapping_and_dense()
      ? at::empty_strided(place.like.sizes(), place.like.strides(), plain)
      : at::empty(place.like.sizes(), plain);
}

at::Tensor share_in(const at::Tensor& local, const FlatRange& range) {
  return local.as_strided({local.numel()}, {1})
      .narrow(0, range.begin, range.size());
}

} // namespace

void copy_share(
    const ShareOf& place, const at::Tensor& whole, const at::Tensor& share) {
  at::Tensor cut = whole;
  for (int64_t dim = 0; dim < place.spec->dim(); ++dim) {
    const auto i = static_cast<size_t>(dim);
    cut = cut.narrow(
        dim, place.spec->local_offsets[i], place.spec->local_sizes[i]);
  }
  const at::Tensor local = laid_out(place, share.options()).copy_(cut);
  share.copy_(share_in(local, place.range));
}

at::Tensor whole_of(
    const ShareOf& place, const at::Tensor& share, const Placements& summed) {
  const at::Tensor local = laid_out(place, share.options()).zero_();
  share_in(local, place.range).copy_(share);
  return full_tensor(wrap_local(
      local,
      intern(
          place.spec->mesh,
          summed,
          place.spec->sizes,
          place.spec->strides,
          share.scalar_type())));
}

} // namespace tessera
