// SPDX-License-Identifier: Apache-2.0
#include <tessera/mesh/chunk.h>
#include <tessera/optim/local_cut.h>

#include <algorithm>

namespace tessera {
namespace {

// The one axis of more than one rank on which the specs differ.
std::optional<size_t> only_difference(
    const TensorSpec& whole, const TensorSpec& part) {
  std::optional<size_t> found;
  for (size_t axis = 0; axis < whole.placements.size(); ++axis) {
    if (whole.placements[axis] == part.placements[axis] ||
        whole.mesh.size(static_cast<int64_t>(axis)) == 1) {
      continue;
    }
    if (found) {
      return std::nullopt;
    }
    found = axis;
  }
  return found;
}

bool is_shared_dim(const TensorSpec& spec, int64_t dim) {
  return std::ranges::count_if(spec.placements, [dim](const Placement& p) {
           return p.is_shard(dim);
         }) > 1;
}

} // namespace

bool is_cut_of(const TensorSpec& part, const TensorSpec& whole) {
  for (size_t axis = 0; axis < whole.placements.size(); ++axis) {
    const Placement& before = whole.placements[axis];
    const Placement& after = part.placements[axis];
    if (before != after && !(before.is_replicate() && after.is_shard())) {
      return false;
    }
  }
  return true;
}

at::Tensor cut_local(
    const at::Tensor& local, const TensorSpec& whole, const TensorSpec& part) {
  at::Tensor view = local;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim);
    if (part.local_sizes[i] != whole.local_sizes[i]) {
      // An empty part lies at the end: its offset may be the whole extent.
      view = view.narrow(
          dim,
          part.local_offsets[i] - whole.local_offsets[i],
          part.local_sizes[i]);
    }
  }
  return view;
}

std::optional<FlatCut> flat_cut(
    const TensorSpec& whole, const TensorSpec& part) {
  const std::optional<size_t> axis = only_difference(whole, part);
  if (!axis || whole.placements[*axis].is_shard() ||
      !part.placements[*axis].is_shard()) {
    return std::nullopt;
  }
  const Placement& shard = part.placements[*axis];
  const auto dim = static_cast<size_t>(shard.dim());
  const auto is_one = [](int64_t extent) { return extent == 1; };
  if (is_shared_dim(part, shard.dim()) ||
      !std::all_of(
          whole.local_sizes.begin(),
          whole.local_sizes.begin() + shard.dim(),
          is_one)) {
    return std::nullopt;
  }
  int64_t row = 1;
  for (size_t i = dim + 1; i < whole.local_sizes.size(); ++i) {
    row *= whole.local_sizes[i];
  }
  FlatCut cut{
      static_cast<int64_t>(*axis),
      chunk_sizes(
          whole.sizes[dim],
          shard.unit(),
          whole.mesh.size(static_cast<int64_t>(*axis)))};
  for (int64_t& count : cut.counts) {
    count *= row;
  }
  return cut;
}

} // namespace tessera
