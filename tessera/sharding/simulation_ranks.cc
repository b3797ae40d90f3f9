// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/sharding/simulation_ranks.h>

namespace tessera::simulation {
namespace {

at::Tensor noise(const at::Tensor& like, int64_t low, int64_t high) {
  return torch::randint(low, high, like.sizes()).to(like.scalar_type());
}

// n tensors whose reduction is `value`, none of them trivial.
Locals contributions(const at::Tensor& value, ReduceOp op, int64_t n) {
  Locals parts;
  at::Tensor first = op == ReduceOp::kAvg ? value * n : value.clone();
  const bool truth = value.scalar_type() == torch::kBool;
  for (int64_t i = 1; i < n; ++i) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        parts.push_back(noise(value, -3, 4));
        first -= parts.back();
        break;
      case ReduceOp::kMax:
        parts.push_back(truth ? value.clone() : value - noise(value, 0, 3));
        break;
      case ReduceOp::kMin:
        parts.push_back(truth ? value.clone() : value + noise(value, 0, 3));
        break;
      case ReduceOp::kProduct:
        parts.push_back(noise(value, 0, 2) * 2 - 1);
        first *= parts.back();
        break;
    }
  }
  parts.insert(parts.begin(), first);
  return parts;
}

} // namespace

at::Tensor reduced(const Locals& parts, ReduceOp op) {
  const at::Tensor all = torch::stack(parts);
  switch (op) {
    case ReduceOp::kSum:
      return all.sum(0, /*keepdim=*/false, all.scalar_type());
    case ReduceOp::kAvg:
      return all.sum(0, /*keepdim=*/false, all.scalar_type())
          .div(static_cast<int64_t>(parts.size()))
          .to(all.scalar_type());
    case ReduceOp::kMax:
      return all.amax(0);
    case ReduceOp::kMin:
      return all.amin(0);
    case ReduceOp::kProduct:
      return all.prod(0, /*keepdim=*/false, all.scalar_type());
  }
  return {};
}

Locals cut(
    const DeviceMesh& mesh,
    const Placements& placements,
    const at::Tensor& value,
    int64_t axis) {
  if (axis == mesh.ndim()) {
    return {value.clone()};
  }
  const Placement& placement = placements[static_cast<size_t>(axis)];
  const int64_t n = mesh.size(axis);
  Locals parts(static_cast<size_t>(n), value);
  if (placement.is_partial()) {
    parts = contributions(value, placement.op(), n);
  }
  Locals all;
  for (int64_t i = 0; i < n; ++i) {
    at::Tensor part = parts[static_cast<size_t>(i)];
    if (placement.is_shard()) {
      const Chunk range =
          chunk(part.size(placement.dim()), placement.unit(), n, i);
      part = part.narrow(placement.dim(), range.offset, range.size);
    }
    const Locals inner = cut(mesh, placements, part, axis + 1);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  const double tolerance = a.scalar_type() == torch::kFloat ? 1e-5 : 1e-9;
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
      torch::allclose(
             a.to(torch::kDouble),
             b.to(torch::kDouble),
             tolerance,
             tolerance,
             /*equal_nan=*/true);
}

at::Tensor assemble(
    const DeviceMesh& mesh,
    const Placements& placements,
    const Locals& locals,
    int64_t axis) {
  if (axis == mesh.ndim()) {
    return locals[0];
  }
  const int64_t n = mesh.size(axis);
  const auto stride = static_cast<int64_t>(locals.size()) / n;
  Locals parts;
  for (int64_t i = 0; i < n; ++i) {
    const auto begin = locals.begin() + i * stride;
    parts.push_back(
        assemble(mesh, placements, Locals(begin, begin + stride), axis + 1));
  }
  const Placement& placement = placements[static_cast<size_t>(axis)];
  if (placement.is_shard()) {
    return torch::cat(parts, placement.dim());
  }
  if (placement.is_partial()) {
    return reduced(parts, placement.op());
  }
  for (const at::Tensor& part : parts) {
    EXPECT_TRUE(same(part, parts[0])) << "replicas differ:\n"
                                      << part << "\n"
                                      << parts[0];
  }
  return parts[0];
}

} // namespace tessera::simulation
