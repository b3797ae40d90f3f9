// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/infer_global.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/mesh/tensor_spec.h>

namespace tessera {
namespace {

// What one rank tells of its local tensor: dims, dtype, then the sizes. Fixed
// in length, so that ranks that disagree still understand.
constexpr int64_t kMostDims = 62;
constexpr int64_t kLength = kMostDims + 2;

at::Tensor description(const at::Tensor& local) {
  if (local.dim() > kMostDims) {
    throw UsageError(fmt::format(
        "from_local: {} dims; at most {} are supported",
        local.dim(),
        kMostDims));
  }
  at::Tensor result = at::empty({kLength}, at::kLong).fill_(0);
  auto* data = result.mutable_data_ptr<int64_t>();
  data[0] = local.dim();
  data[1] = static_cast<int64_t>(local.scalar_type());
  std::copy(local.sizes().begin(), local.sizes().end(), data + 2);
  return result;
}

// Every rank's description in the mesh's row-major order: gathered along the
// last axis first.
std::vector<std::vector<int64_t>> gather(
    const at::Tensor& own, const DeviceMesh& mesh) {
  at::Tensor all = own.to(mesh.device());
  for (int64_t axis = mesh.ndim(); axis-- > 0;) {
    const int64_t ranks = mesh.size(axis);
    if (ranks == 1) {
      continue;
    }
    at::Tensor out = at::empty({all.numel() * ranks}, all.options());
    mesh.group(axis)
        .all_gather(
            all,
            out,
            std::vector<int64_t>(static_cast<size_t>(ranks), all.numel()))
        ->wait();
    all = out;
  }
  std::vector<std::vector<int64_t>> result;
  all = all.to(c10::kCPU);
  const auto* data = all.const_data_ptr<int64_t>();
  for (int64_t begin = 0; begin < all.numel(); begin += kLength) {
    result.emplace_back(data + begin, data + begin + kLength);
  }
  return result;
}

std::string shapes_text(const std::vector<std::vector<int64_t>>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::vector<int64_t> sizes(
        ranks[i].begin() + 2, ranks[i].begin() + 2 + ranks[i][0]);
    text += fmt::format("{}[{}]", i == 0 ? "" : ", ", fmt::join(sizes, ", "));
  }
  return text;
}

[[noreturn]] void refuse(
    const DeviceMesh& mesh,
    const Placements& placements,
    const std::vector<std::vector<int64_t>>& ranks,
    const std::string& why) {
  throw UsageError(fmt::format(
      "from_local [rank {}, {} placed {}]: local shapes {} {}; the last ranks "
      "of an axis hold the short chunks (10 over 4 is 3, 3, 3, 1)",
      mesh.world().rank(),
      mesh.str(),
      str(placements),
      shapes_text(ranks),
      why));
}

// Position in row-major order of the rank that has `coordinate` on `axis` and
// zero elsewhere.
size_t position_along(
    const DeviceMesh& mesh, int64_t axis, int64_t coordinate) {
  int64_t stride = 1;
  for (int64_t a = mesh.ndim() - 1; a > axis; --a) {
    stride *= mesh.size(a);
  }
  return static_cast<size_t>(coordinate * stride);
}

// The extent of dim `dim`: the sum over the ranks of the grid that the sharding
// axes span, the others at zero.
int64_t extent(
    const DeviceMesh& mesh,
    const Placements& placements,
    const std::vector<std::vector<int64_t>>& ranks,
    int64_t dim,
    int64_t rank_dims) {
  std::vector<size_t> positions{0};
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const Placement& placement = placements[static_cast<size_t>(axis)];
    const int64_t cut = placement.is_shard() && placement.dim() < 0
        ? placement.dim() + rank_dims
        : placement.dim();
    if (!placement.is_shard() || cut != dim) {
      continue;
    }
    std::vector<size_t> next;
    for (size_t base : positions) {
      for (int64_t c = 0; c < mesh.size(axis); ++c) {
        next.push_back(base + position_along(mesh, axis, c));
      }
    }
    positions = std::move(next);
  }
  int64_t total = 0;
  for (size_t position : positions) {
    total += ranks[position][static_cast<size_t>(dim) + 2];
  }
  return total;
}

std::vector<int64_t> coordinates_of(const DeviceMesh& mesh, size_t position) {
  std::vector<int64_t> result(static_cast<size_t>(mesh.ndim()));
  auto rest = static_cast<int64_t>(position);
  for (int64_t axis = mesh.ndim(); axis-- > 0;) {
    result[static_cast<size_t>(axis)] = rest % mesh.size(axis);
    rest /= mesh.size(axis);
  }
  return result;
}

void check_against(
    const TensorSpec& spec,
    const Placements& placements,
    const std::vector<std::vector<int64_t>>& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (int64_t dim = 0; dim < spec.dim(); ++dim) {
      const int64_t expected =
          local_range(spec, dim, coordinates_of(spec.mesh, r)).size;
      if (ranks[r][static_cast<size_t>(dim) + 2] != expected) {
        refuse(
            spec.mesh,
            placements,
            ranks,
            fmt::format(
                "fit no global shape: of [{}], rank {} of the mesh would hold "
                "{} along dim {}",
                fmt::join(spec.sizes, ", "),
                r,
                expected,
                dim));
      }
    }
  }
}

} // namespace

std::vector<int64_t> infer_global_sizes(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placements& placements) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim()) {
    throw UsageError(fmt::format(
        "from_local: {} placements for {}; one per mesh axis is needed",
        placements.size(),
        mesh.str()));
  }
  const std::vector<std::vector<int64_t>> ranks =
      gather(description(local), mesh);
  for (const std::vector<int64_t>& rank : ranks) {
    if (rank[0] != ranks[0][0]) {
      refuse(mesh, placements, ranks, "differ in their number of dims");
    }
    if (rank[1] != ranks[0][1]) {
      refuse(mesh, placements, ranks, "differ in dtype");
    }
  }
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < local.dim(); ++dim) {
    sizes.push_back(extent(mesh, placements, ranks, dim, local.dim()));
  }
  check_against(
      *intern_contiguous(mesh, placements, sizes, local.scalar_type()),
      placements,
      ranks);
  return sizes;
}

} // namespace tessera
