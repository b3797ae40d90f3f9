// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/autograd_functions.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/infer_global.h>
#include <tessera/dtensor/layout.h>
#include <tessera/dtensor/redistribute.h>

#include <utility>

namespace tessera {
namespace {

DTensorImpl* require_dtensor(const at::Tensor& tensor, const char* operation) {
  DTensorImpl* impl = tensor.defined() ? DTensorImpl::get(tensor) : nullptr;
  if (impl == nullptr) {
    throw UsageError(fmt::format(
        "{}: got {}; expected a distributed tensor, as distribute, from_local "
        "and build make them",
        operation,
        tensor.defined() ? "a plain tensor" : "an undefined tensor"));
  }
  return impl;
}

void require_plain(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined() || is_dtensor(tensor)) {
    throw UsageError(fmt::format(
        "{}: got {}; expected a plain tensor{}",
        operation,
        tensor.defined() ? "a tensor that is distributed already"
                         : "an undefined tensor",
        tensor.defined() ? " (redistribute changes placements)" : ""));
  }
}

void require_device(
    const at::Tensor& tensor, const DeviceMesh& mesh, const char* operation) {
  if (tensor.device() != mesh.device()) {
    throw UsageError(fmt::format(
        "{}: got a tensor on {}, {} is on {}; move it there with "
        "to(mesh.device())",
        operation,
        tensor.device().str(),
        mesh.str(),
        mesh.device().str()));
  }
}

// The value of the mesh's first rank reaches every rank, one axis after the
// other.
at::Tensor broadcast_from_first(
    const at::Tensor& value, const DeviceMesh& mesh) {
  at::Tensor copy = value.clone(at::MemoryFormat::Contiguous);
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.size(axis) > 1) {
      mesh.group(axis).broadcast(copy, 0)->wait();
    }
  }
  return copy;
}

void check_alike(const at::Tensor& own, const DeviceMesh& mesh) {
  const at::Tensor first = broadcast_from_first(own, mesh);
  const bool same = first.equal(own);
  at::Tensor differing =
      at::empty({1}, own.options().dtype(at::kLong)).fill_(same ? 0 : 1);
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.size(axis) > 1) {
      mesh.group(axis).all_reduce(differing, ReduceOp::kSum)->wait();
    }
  }
  const auto count = differing.item<int64_t>();
  if (count > 0) {
    throw UsageError(fmt::format(
        "distribute [rank {}, {}]: {} of {} ranks hold another value than the "
        "mesh's first rank{}; with own_value every rank passes the same "
        "tensor, without it the first rank's is taken",
        mesh.world().rank(),
        mesh.str(),
        count,
        mesh.size(),
        same ? "" : ", this one among them"));
  }
}

} // namespace

bool is_dtensor(const at::Tensor& tensor) {
  return tensor.defined() && DTensorImpl::get(tensor) != nullptr;
}

SpecPtr spec_of(const at::Tensor& tensor) {
  DTensorImpl* impl = require_dtensor(tensor, "spec_of");
  return impl->spec();
}

const Placements& placements_of(const at::Tensor& tensor) {
  return spec_of(tensor)->placements;
}

const at::Tensor& local_of(const at::Tensor& tensor) {
  return require_dtensor(tensor, "local_of")->local();
}

at::Tensor wrap_local(at::Tensor local, SpecPtr spec) {
  return DTensorImpl::wrap(std::move(local), spec);
}

at::Tensor to_local(
    const at::Tensor& tensor, std::optional<Placements> grad_placements) {
  const SpecPtr spec = require_dtensor(tensor, "to_local")->spec();
  const bool chosen = grad_placements.has_value();
  Placements placements = std::move(grad_placements).value_or(spec->placements);
  if (!chosen) {
    for (Placement& placement : placements) {
      placement = placement.is_partial() ? Placement(Replicate{}) : placement;
    }
  }
  return to_local_function(tensor, with_placements(spec, placements));
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  const SpecPtr spec = require_dtensor(tensor, "full_tensor")->spec();
  AskerScope asker("full_tensor");
  return spec->is_replicated()
      ? to_local(tensor).clone()
      : to_local(redistribute(tensor, replicated(spec->mesh)));
}

at::Tensor redistribute(
    const at::Tensor& tensor, const Placements& placements) {
  const SpecPtr spec = require_dtensor(tensor, "redistribute")->spec();
  return redistribute_function(tensor, with_placements(spec, placements));
}

at::Tensor distribute(
    const at::Tensor& value,
    const DeviceMesh& mesh,
    const Placements& placements,
    const DistributeOptions& options) {
  require_plain(value, "distribute");
  require_device(value, mesh, "distribute");
  AskerScope asker("distribute");
  const SpecPtr to =
      intern_contiguous(mesh, placements, value.sizes(), value.scalar_type());
  at::Tensor whole;
  {
    c10::impl::ExcludeDispatchKeyGuard guard(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    if (options.own_value) {
      check_alike(value.contiguous(), mesh);
    }
    whole = options.own_value ? value : broadcast_from_first(value, mesh);
  }
  return distribute_function(value, whole, to);
}

at::Tensor from_local(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placements& placements,
    std::optional<std::vector<int64_t>> global_sizes) {
  require_plain(local, "from_local");
  require_device(local, mesh, "from_local");
  AskerScope asker("from_local");
  const std::vector<int64_t> sizes = global_sizes.has_value()
      ? std::move(*global_sizes)
      : infer_global_sizes(local, mesh, placements);
  const SpecPtr spec =
      intern_contiguous(mesh, placements, sizes, local.scalar_type());
  if (local.sizes() != c10::IntArrayRef(spec->local_sizes)) {
    throw UsageError(fmt::format(
        "from_local [rank {}, {}]: local shape [{}] of global [{}] placed {}; "
        "expected [{}] here; pass the chunk that `chunk` gives, or "
        "distribute the whole tensor",
        mesh.world().rank(),
        mesh.str(),
        fmt::join(local.sizes(), ", "),
        fmt::join(sizes, ", "),
        str(spec->placements),
        fmt::join(spec->local_sizes, ", ")));
  }
  return from_local_function(local, spec);
}

} // namespace tessera
