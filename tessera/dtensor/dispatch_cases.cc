// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dispatch_cases.h>

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sum.h>
#include <tessera/dtensor/dtensor.h>

#include <array>

namespace tessera {
namespace {

using Operands = DispatchOperands;

constexpr int64_t kSignatures = 16;

// How the three operands of one signature lie on the mesh's only axis.
using Triple = std::array<Placement, 3>;

// The operands of mm(x, y) and addmm(z, x, y); for the others x and y are
// alike.
std::vector<Triple> placements_for(const std::string& name) {
  const Placement r = Replicate{};
  const Placement s0 = Shard(0);
  const Placement s1 = Shard(1);
  if (name == "mm" || name == "addmm") {
    return {{s0, r, s0}, {r, s1, s1}, {r, r, r}, {s1, s0, Partial()}};
  }
  if (name == "view") {
    return {{r, r, r}, {s0, s0, s0}};
  }
  return {{r, r, r}, {s0, s0, s0}, {s1, s1, s1}};
}

at::Tensor local_ones(
    c10::IntArrayRef sizes,
    const Placement& placement,
    const DeviceMesh& mesh) {
  const SpecPtr spec = intern_contiguous(mesh, {placement}, sizes, at::kFloat);
  return at::ones(spec->local_sizes);
}

void add_operand(
    at::Tensor& plain,
    at::Tensor& distributed,
    c10::IntArrayRef sizes,
    const Placement& placement,
    const DeviceMesh& mesh,
    bool requires_grad) {
  plain = local_ones(sizes, placement, mesh);
  const SpecPtr spec = intern_contiguous(mesh, {placement}, sizes, at::kFloat);
  distributed = wrap_local(plain.clone(), spec);
  if (requires_grad) {
    plain.requires_grad_();
    distributed.requires_grad_();
  }
}

} // namespace

const std::vector<DispatchCase>& dispatch_cases() {
  static const std::vector<DispatchCase> cases = {
      {"detach", [](const Operands& o) { return o.x.detach(); }, false},
      {"add", [](const Operands& o) { return at::add(o.x, o.y); }, false},
      {"mul", [](const Operands& o) { return at::mul(o.x, o.y); }, false},
      {"mm", [](const Operands& o) { return at::mm(o.x, o.y); }, false},
      {"addmm",
       [](const Operands& o) { return at::addmm(o.z, o.x, o.y); },
       false},
      {"t", [](const Operands& o) { return o.x.t(); }, false},
      {"view",
       [](const Operands& o) {
         return o.x.view({o.rows, 4, 4});
       },
       false},
      {"relu", [](const Operands& o) { return at::relu(o.x); }, false},
      {"sum", [](const Operands& o) { return at::sum(o.x); }, false},
      {"empty_like",
       [](const Operands& o) { return at::empty_like(o.x); },
       false},
      {"add_", [](const Operands& o) { return o.x.add_(o.y); }, true},
  };
  return cases;
}

DispatchSignatures dispatch_signatures(
    const DispatchCase& which, const DeviceMesh& mesh, bool requires_grad) {
  const std::vector<Triple> placements = placements_for(which.name);
  const bool product = which.name == "mm" || which.name == "addmm";
  const bool grad = requires_grad && !which.writes;
  DispatchSignatures result;
  for (int64_t i = 0; i < kSignatures; ++i) {
    const Triple& at = placements[static_cast<size_t>(i) % placements.size()];
    const int64_t rows = 16 + 2 * i;
    const std::vector<int64_t> wide = {rows, 16};
    const std::vector<int64_t> second =
        product ? std::vector<int64_t>{16, 16} : wide;
    Operands plain;
    Operands distributed;
    add_operand(plain.x, distributed.x, wide, at[0], mesh, grad);
    add_operand(plain.y, distributed.y, second, at[1], mesh, grad);
    add_operand(plain.z, distributed.z, wide, at[2], mesh, grad);
    plain.rows = plain.x.size(0);
    distributed.rows = rows;
    result.plain.push_back(plain);
    result.distributed.push_back(distributed);
  }
  return result;
}

} // namespace tessera
