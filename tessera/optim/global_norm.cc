// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
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

// Norms add up as sums of their powers, or as their maximum.
class Accumulator {
 public:
  explicit Accumulator(double norm_type) : norm_type_(norm_type) {}

  void add(double norm) {
    if (std::isinf(norm_type_)) {
      value_ = std::max(
          value_,
          std::isnan(norm) ? std::numeric_limits<double>::infinity()
                           : norm); // a maximum over ranks may lose NaN
    } else {
      value_ += std::pow(norm, norm_type_);
    }
  }

  double over(const World& world) const {
    const at::Tensor sum =
        at::scalar_tensor(value_, c10::TensorOptions().dtype(c10::kDouble));
    world.group()
        .all_reduce(
            sum, std::isinf(norm_type_) ? ReduceOp::kMax : ReduceOp::kSum)
        ->wait();
    const auto total = sum.item<double>();
    return std::isinf(norm_type_) ? total : std::pow(total, 1 / norm_type_);
  }

 private:
  double norm_type_;
  double value_ = 0;
};

} // namespace

double global_norm(
    const World& world, const std::vector<NormPart>& parts, double norm_type) {
  Accumulator total(norm_type);
  for (const NormPart& part : parts) {
    if (part.local.numel() > 0 &&
        is_first_on(part.spec->mesh, part.spec->placements)) {
      total.add(local_norm(part.local, norm_type));
    }
  }
  return total.over(world);
}

double clip_coefficient(double max_norm, double norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;
}

double combine_norms(
    const World& world, const std::vector<MeshNorm>& norms, double norm_type) {
  Accumulator total(norm_type);
  for (const MeshNorm& part : norms) {
    const auto& coordinates = part.mesh.coordinates();
    if (std::ranges::all_of(coordinates, [](int64_t c) { return c == 0; })) {
      total.add(part.norm);
    }
  }
  return total.over(world);
}

} // namespace tessera
