// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/base/index.h>
#include <tessera/mesh/device_mesh_impl.h>
#include <tessera/mesh/tensor_spec.h>

#include <algorithm>
#include <atomic>
#include <functional>

namespace tessera {

namespace {

// The product of the sizes; 0 as soon as one of them is 0.
int64_t checked_numel(c10::IntArrayRef sizes) {
  int64_t numel = 1;
  bool overflow = false;
  for (int64_t size : sizes) {
    if (size < 0) {
      throw UsageError(fmt::format(
          "spec: sizes [{}] hold a negative one; sizes start at 0",
          fmt::join(sizes, ", ")));
    }
    if (size == 0) {
      return 0;
    }
    overflow = __builtin_mul_overflow(numel, size, &numel) || overflow;
  }
  if (overflow) {
    throw UsageError(fmt::format(
        "spec: sizes [{}] hold more elements than 64 bits count; use smaller "
        "sizes",
        fmt::join(sizes, ", ")));
  }
  return numel;
}

Shard checked_shard(
    const Placement& placement, c10::IntArrayRef sizes, const Axis& axis) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  const int64_t dim =
      placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
  if (ndim == 0) {
    throw UsageError(fmt::format(
        "placement [axis {}]: Shard({}) of a tensor without dims; use "
        "Replicate()",
        axis.name,
        placement.dim()));
  }
  if (dim < 0 || dim >= ndim) {
    throw UsageError(fmt::format(
        "placement [axis {}]: Shard({}) of a tensor of shape [{}]; dims go "
        "from "
        "{} to {}",
        axis.name,
        placement.dim(),
        fmt::join(sizes, ", "),
        -ndim,
        ndim - 1));
  }
  if (placement.unit() < 1) {
    throw UsageError(fmt::format(
        "placement [axis {}]: Shard({}) has unit {}; units start at 1",
        axis.name,
        placement.dim(),
        placement.unit()));
  }
  return Shard(dim, placement.unit());
}

// All extents that the chunks of one dim have, over all coordinates of the
// axes seen so far. Few: chunks are full, one is short, the rest are empty.
using Extents = std::vector<int64_t>;

// Cuts every extent again, as the next axis does, and tells whether the unit
// moved a boundary.
bool cut(Extents& extents, int64_t unit, int64_t parts) {
  bool moved = false;
  Extents next;
  for (int64_t extent : extents) {
    const std::vector<int64_t> sizes = chunk_sizes(extent, unit, parts);
    moved = moved || (unit != 1 && sizes != chunk_sizes(extent, 1, parts));
    next.insert(next.end(), sizes.begin(), sizes.end());
  }
  std::sort(next.begin(), next.end(), std::greater<>());
  next.erase(std::unique(next.begin(), next.end()), next.end());
  extents = std::move(next);
  return moved;
}

Placements canonical(
    const DeviceMesh& mesh,
    const Placements& placements,
    c10::IntArrayRef sizes) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim()) {
    throw UsageError(fmt::format(
        "placements {} on {}: {} placements for {} mesh axes; give one per "
        "axis",
        str(placements),
        mesh.str(),
        placements.size(),
        mesh.ndim()));
  }
  Placements result = placements;
  std::vector<Extents> extents;
  for (int64_t size : sizes) {
    extents.push_back({size});
  }
  for (size_t axis = 0; axis < result.size(); ++axis) {
    if (result[axis].is_shard()) {
      const Axis& mesh_axis = mesh.axes()[axis];
      const Shard shard = checked_shard(result[axis], sizes, mesh_axis);
      const bool moved =
          cut(extents[at(shard.dim)], shard.unit, mesh_axis.size);
      result[axis] = Shard(shard.dim, moved ? shard.unit : 1);
    } else if (result[axis].is_partial()) {
      result[axis] = Partial(result[axis].op());
    } else {
      result[axis] = Replicate();
    }
  }
  return result;
}

// The range of `dim` that the first `axes` axes leave to a rank.
Chunk nested_range(
    const TensorSpec& spec,
    int64_t dim,
    const std::vector<int64_t>& coordinates,
    int64_t axes) {
  Chunk range{0, spec.sizes[at(dim)]};
  for (int64_t axis = 0; axis < axes; ++axis) {
    const Placement& placement = spec.placements[at(axis)];
    if (placement.is_shard(dim)) {
      const Chunk inner = chunk(
          range.size,
          placement.unit(),
          spec.mesh.size(axis),
          coordinates[at(axis)]);
      range = {range.offset + inner.offset, inner.size};
    }
  }
  return range;
}

std::unique_ptr<TensorSpec> make_spec(
    const DeviceMesh& mesh, const SpecKey& key) {
  static std::atomic<uint64_t> next_id{1};
  auto spec = std::make_unique<TensorSpec>();
  spec->id = next_id.fetch_add(1, std::memory_order_relaxed);
  spec->mesh = mesh;
  spec->placements = key.placements;
  spec->sizes = key.sizes.vec();
  spec->strides = key.strides.vec();
  spec->dtype = key.dtype;
  spec->global_numel = checked_numel(key.sizes);
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    const Chunk range =
        nested_range(*spec, dim, mesh.coordinates(), mesh.ndim());
    spec->local_offsets.push_back(range.offset);
    spec->local_sizes.push_back(range.size);
  }
  spec->local_numel = checked_numel(spec->local_sizes);
  spec->replicated = true;
  for (const Placement& placement : spec->placements) {
    spec->replicated = spec->replicated && placement.is_replicate();
    spec->partial = spec->partial || placement.is_partial();
    spec->sharded = spec->sharded || placement.is_shard();
  }
  return spec;
}

void check_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const bool fits = sizes.size() == strides.size() &&
      std::all_of(strides.begin(), strides.end(), [](int64_t s) {
                      return s >= 0;
                    });
  if (!fits) {
    throw UsageError(fmt::format(
        "spec: strides [{}] for sizes [{}]; give one stride per dim, 0 or more",
        fmt::join(strides, ", "),
        fmt::join(sizes, ", ")));
  }
}

} // namespace

std::string TensorSpec::str() const {
  return fmt::format(
      "{} [{}] on {} placed {}",
      c10::toString(dtype),
      fmt::join(sizes, ", "),
      mesh.str(),
      tessera::str(placements));
}

SpecPtr intern(
    const DeviceMesh& mesh,
    const Placements& placements,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    c10::ScalarType dtype) {
  check_strides(sizes, strides);
  checked_numel(sizes);
  const Placements canonical_placements = canonical(mesh, placements, sizes);
  const SpecKey key{canonical_placements, sizes, strides, dtype};
  if (SpecPtr known = mesh.impl()->specs.find(key)) {
    return known;
  }
  return mesh.impl()->specs.insert(make_spec(mesh, key));
}

SpecPtr intern_contiguous(
    const DeviceMesh& mesh,
    const Placements& placements,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) {
  checked_numel(sizes);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    // Only with a size of 0 elsewhere can this overflow; any stride will do.
    if (__builtin_mul_overflow(
            stride, std::max<int64_t>(sizes[dim], 1), &stride)) {
      stride = 1;
    }
  }
  return intern(mesh, placements, sizes, strides, dtype);
}

Placements replicated(const DeviceMesh& mesh) {
  return Placements(static_cast<size_t>(mesh.ndim()), Replicate());
}

SpecPtr with_placements(SpecPtr spec, const Placements& placements) {
  if (placements == spec->placements) {
    return spec;
  }
  return intern(
      spec->mesh, placements, spec->sizes, spec->strides, spec->dtype);
}

Chunk local_range(
    const TensorSpec& spec,
    int64_t dim,
    const std::vector<int64_t>& coordinates) {
  return nested_range(spec, dim, coordinates, spec.mesh.ndim());
}

std::vector<Chunk> peer_chunks(SpecPtr spec, int64_t axis) {
  const Placement& placement = spec->placements[at(axis)];
  if (!placement.is_shard()) {
    throw UsageError(fmt::format(
        "peer_chunks [axis {}]: {} is not a Shard; ask for a sharded axis",
        spec->mesh.axes()[at(axis)].name,
        placement.str()));
  }
  const Chunk parent =
      nested_range(*spec, placement.dim(), spec->mesh.coordinates(), axis);
  std::vector<Chunk> chunks;
  for (int64_t i = 0; i < spec->mesh.size(axis); ++i) {
    chunks.push_back(
        chunk(parent.size, placement.unit(), spec->mesh.size(axis), i));
  }
  return chunks;
}

} // namespace tessera
