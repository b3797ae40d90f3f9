// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <tessera/comm/group.h>
#include <tessera/comm/world.h>
#include <tessera/optim/global_norm.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {
namespace {

bool is_first_on(const DeviceMesh& mesh, const Placements& placements) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_replicate() &&
        mesh.coordinate(static_cast<int64_t>(axis)) != 0) {
      return false;
    }
  }
  return true;
}

double local_norm(const at::Tensor& local, double norm_type) {
  const auto type = local.scalar_type();
  const auto precision =
      type == c10::kHalf || type == c10::kBFloat16 ? c10::kFloat : type;
  return at::linalg_vector_norm(
             local, norm_type, std::nullopt, /*keepdim=*/false, precision)
      .item<double>();
}

double over_ranks(const World& world, const NormSum& sum, double norm_type) {
  std::vector<double> values{sum.value()};
  all_reduce_values(world, values, sum.op());
  return NormSum::norm_of(values.front(), norm_type);
}

} // namespace

void NormSum::add(const at::Tensor& local) {
  if (local.numel() > 0) {
    add_norm(local_norm(local, norm_type_));
  }
}

void NormSum::add_norm(double norm) {
  if (std::isinf(norm_type_)) {
    value_ = std::max(
        value_,
        std::isnan(norm) ? std::numeric_limits<double>::infinity()
                         : norm); // a maximum over ranks may lose NaN
  } else {
    value_ += std::pow(norm, norm_type_);
  }
}

ReduceOp NormSum::op() const {
  return std::isinf(norm_type_) ? ReduceOp::kMax : ReduceOp::kSum;
}

double NormSum::norm_of(double value, double norm_type) {
  return std::isinf(norm_type) ? value : std::pow(value, 1 / norm_type);
}

void all_reduce_values(
    const World& world, std::vector<double>& values, ReduceOp op) {
  const at::Tensor together = at::from_blob(
      values.data(),
      {static_cast<int64_t>(values.size())},
      c10::TensorOptions().dtype(c10::kDouble));
  world.group().all_reduce(together, op)->wait();
}

double global_norm(
    const World& world, const std::vector<NormPart>& parts, double norm_type) {
  NormSum total(norm_type);
  for (const NormPart& part : parts) {
    if (is_first_on(part.spec->mesh, part.spec->placements)) {
      total.add(part.local);
    }
  }
  return over_ranks(world, total, norm_type);
}

double clip_coefficient(double max_norm, double norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;
}

double combine_norms(
    const World& world, const std::vector<MeshNorm>& norms, double norm_type) {
  NormSum total(norm_type);
  for (const MeshNorm& part : norms) {
    const auto& coordinates = part.mesh.coordinates();
    if (std::ranges::all_of(coordinates, [](int64_t c) { return c == 0; })) {
      total.add_norm(part.norm);
    }
  }
  return over_ranks(world, total, norm_type);
}

} // namespace tessera
