// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/sharding/simulation_ranks.h>

namespace tessera::simulation {
namespace {

// Contributions of n ranks that reduce to the value.
Locals contributions(const at::Tensor& value, ReduceOp op, int64_t n) {
  Locals parts;
  at::Tensor rest = op == ReduceOp::kAvg ? value * n : value.clone();
  for (int64_t i = 1; i < n; ++i) {
    at::Tensor part = value.clone();
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) {
      part = torch::randint(-3, 4, value.sizes()).to(value.scalar_type());
      rest = rest - part;
    } else if (op == ReduceOp::kProduct) {
      part.fill_(2);
      rest = rest / 2;
    }
    parts.push_back(part);
  }
  parts.push_back(rest);
  return parts;
}

at::Tensor combined(const Locals& parts, ReduceOp op) {
  const at::Tensor all = torch::stack(parts);
  switch (op) {
    case ReduceOp::kSum:
      return all.sum(0, false, all.scalar_type());
    case ReduceOp::kAvg:
      return all.mean(0);
    case ReduceOp::kMax:
      return all.amax(0);
    case ReduceOp::kMin:
      return all.amin(0);
    default:
      return all.prod(0, false, all.scalar_type());
  }
}

} // namespace

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
    return combined(parts, placement.op());
  }
  for (const at::Tensor& part : parts) {
    EXPECT_TRUE(same(part, parts[0])) << "replicas differ:\n"
                                      << part << "\n"
                                      << parts[0];
  }
  return parts[0];
}

} // namespace tessera::simulation
