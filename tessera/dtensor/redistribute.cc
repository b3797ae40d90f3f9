// SPDX-License-Identifier: Apache-2.0
//
// Executing a redistribution. `plan_redistribution` says by which single-axis steps a tensor goes; here each step becomes at most one
// collective on the axis's group, and the packing around it.
//
// A collective moves flat buffers laid out peer after peer. Where the cut dim is the outermost one with more than one element, a contiguous
// tensor already is such a buffer and nothing is packed; otherwise the pieces for each peer are copied together, and what arrives is put
// side by side along the dim. Chunks are those of `peer_chunks`: uneven and empty ones need no special care, they are counts.
#include <tessera/dtensor/redistribute.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/layout.h>

#include <functional>
#include <utility>

namespace tessera {
namespace {

using Kind = RedistributionStep::Kind;

// One step under way.
struct StepRun {
  WorkPtr work; // null: nothing is in flight
  std::function<at::Tensor()> finish; // after the work is done
};

StepRun done(at::Tensor result) {
  return {nullptr, [result = std::move(result)] { return result; }};
}

const Placement& source(const RedistributionStep& step) {
  return step.from->placements[static_cast<size_t>(step.axis)];
}

const Placement& target(const RedistributionStep& step) {
  return step.to->placements[static_cast<size_t>(step.axis)];
}

const Group& group_of(const RedistributionStep& step) {
  return step.from->mesh.group(step.axis);
}

int64_t coordinate_of(const RedistributionStep& step) {
  return step.from->mesh.coordinate(step.axis);
}

// Whether a contiguous tensor's memory is already cut along `dim`, piece after piece.
bool outermost(c10::IntArrayRef sizes, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (sizes[static_cast<size_t>(d)] != 1) {
      return false;
    }
  }
  return true;
}

// Elements of the tensor per element of `dim`.
int64_t slab(c10::IntArrayRef sizes, int64_t dim) {
  int64_t product = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    product *= static_cast<int64_t>(d) == dim ? 1 : sizes[d];
  }
  return product;
}

std::vector<int64_t> counts_of(const std::vector<Chunk>& chunks, int64_t elements_per_index) {
  std::vector<int64_t> counts;
  for (const Chunk& piece : chunks) {
    counts.push_back(piece.size * elements_per_index);
  }
  return counts;
}

std::vector<int64_t> with_size(c10::IntArrayRef sizes, int64_t dim, int64_t size) {
  std::vector<int64_t> result = sizes.vec();
  result[static_cast<size_t>(dim)] = size;
  return result;
}

// The tensor's pieces along `dim`, each contiguous, one after the other in a flat buffer.
at::Tensor pack(const at::Tensor& tensor, int64_t dim, const std::vector<Chunk>& chunks) {
  if (outermost(tensor.sizes(), dim)) {
    return tensor.contiguous().view(-1);
  }
  std::vector<at::Tensor> pieces;
  for (const Chunk& piece : chunks) {
    pieces.push_back(tensor.narrow(dim, piece.offset, piece.size).reshape(-1));
  }
  return at::cat(pieces);
}

// The inverse of pack: `flat` holds pieces of shape `sizes` but for their extent along `dim`.
at::Tensor unpack(const at::Tensor& flat, c10::IntArrayRef sizes, int64_t dim, const std::vector<int64_t>& extents) {
  int64_t total = 0;
  for (int64_t extent : extents) {
    total += extent;
  }
  if (outermost(sizes, dim)) {
    return flat.view(with_size(sizes, dim, total));
  }
  std::vector<at::Tensor> pieces;
  int64_t offset = 0;
  for (int64_t extent : extents) {
    const std::vector<int64_t> shape = with_size(sizes, dim, extent);
    const int64_t count = slab(sizes, dim) * extent;
    pieces.push_back(flat.narrow(0, offset, count).view(shape));
    offset += count;
  }
  return at::cat(pieces, dim);
}

// A dense copy that the collective may write into, seen flat. Its layout stays the tensor's where that is dense.
StepRun start_all_reduce(const at::Tensor& local, const RedistributionStep& step, std::function<at::Tensor(at::Tensor)> then) {
  at::Tensor copy = local.clone();
  if (!copy.is_non_overlapping_and_dense()) {
    copy = copy.contiguous();
  }
  at::Tensor flat = copy.is_contiguous() ? copy.view(-1) : copy.as_strided({copy.numel()}, {1});
  WorkPtr work = group_of(step).all_reduce(flat, source(step).op());
  return {work, [copy, flat, then = std::move(then)] { return then(copy); }};
}

StepRun start_reduce_scatter(const at::Tensor& local, const RedistributionStep& step) {
  const int64_t dim = target(step).dim();
  const std::vector<Chunk> chunks = peer_chunks(step.to, step.axis);
  at::Tensor in = pack(local, dim, chunks);
  at::Tensor out = at::empty(step.to->local_sizes, local.options());
  WorkPtr work =
    group_of(step).reduce_scatter(in, out.view(-1), counts_of(chunks, slab(local.sizes(), dim)), source(step).op());
  return {work, [in, out] { return out; }};
}

StepRun start_all_gather(const at::Tensor& local, const RedistributionStep& step) {
  const int64_t dim = source(step).dim();
  const std::vector<int64_t> counts = counts_of(peer_chunks(step.from, step.axis), slab(local.sizes(), dim));
  at::Tensor in = local.contiguous().view(-1);
  int64_t total = 0;
  for (int64_t count : counts) {
    total += count;
  }
  at::Tensor out = at::empty({total}, local.options());
  WorkPtr work = group_of(step).all_gather(in, out, counts);
  std::vector<int64_t> sizes = local.sizes().vec();
  std::vector<int64_t> extents = counts_of(peer_chunks(step.from, step.axis), 1);
  return {work, [in, out, sizes, dim, extents] { return unpack(out, sizes, dim, extents); }};
}

// What one rank of the axis sends another when a shard changes its dim, or its boundaries along the same dim.
struct Piece {
  Chunk rows; // along the old dim, relative to the sender's local
  Chunk columns; // along the new dim, likewise; unused when the dims are the same
};

Chunk intersection(const Chunk& held, const Chunk& wanted) {
  const int64_t begin = std::max(held.offset, wanted.offset);
  const int64_t end = std::min(held.offset + held.size, wanted.offset + wanted.size);
  return {std::min(begin - held.offset, held.size), std::max<int64_t>(0, end - begin)};
}

StepRun start_reshard_same_dim(const at::Tensor& local, const RedistributionStep& step) {
  const int64_t dim = source(step).dim();
  const std::vector<Chunk> held = peer_chunks(step.from, step.axis);
  const std::vector<Chunk> wanted = peer_chunks(step.to, step.axis);
  const auto me = static_cast<size_t>(coordinate_of(step));
  std::vector<Chunk> sent;
  std::vector<int64_t> received;
  for (size_t peer = 0; peer < held.size(); ++peer) {
    sent.push_back(intersection(held[me], wanted[peer]));
    received.push_back(intersection(held[peer], wanted[me]).size);
  }
  const int64_t per_index = slab(local.sizes(), dim);
  std::vector<at::Tensor> pieces;
  for (const Chunk& piece : sent) {
    pieces.push_back(local.narrow(dim, piece.size == 0 ? 0 : piece.offset, piece.size).reshape(-1));
  }
  at::Tensor in = at::cat(pieces);
  at::Tensor out = at::empty({wanted[me].size * per_index}, local.options());
  std::vector<int64_t> out_counts;
  for (int64_t extent : received) {
    out_counts.push_back(extent * per_index);
  }
  WorkPtr work = group_of(step).all_to_all(in, out, counts_of(sent, per_index), out_counts);
  std::vector<int64_t> sizes = local.sizes().vec();
  return {work, [in, out, sizes, dim, received] { return unpack(out, sizes, dim, received); }};
}

StepRun start_all_to_all(const at::Tensor& local, const RedistributionStep& step) {
  if (source(step).dim() == target(step).dim()) {
    return start_reshard_same_dim(local, step);
  }
  const int64_t old_dim = source(step).dim();
  const int64_t new_dim = target(step).dim();
  const std::vector<Chunk> held = peer_chunks(step.from, step.axis);
  const std::vector<Chunk> wanted = peer_chunks(step.to, step.axis);
  const int64_t mine = wanted[static_cast<size_t>(coordinate_of(step))].size;
  at::Tensor in = pack(local, new_dim, wanted);
  std::vector<int64_t> sizes = with_size(local.sizes(), new_dim, mine);
  const std::vector<int64_t> out_counts = counts_of(held, slab(sizes, old_dim));
  int64_t total = 0;
  for (int64_t count : out_counts) {
    total += count;
  }
  at::Tensor out = at::empty({total}, local.options());
  WorkPtr work = group_of(step).all_to_all(in, out, counts_of(wanted, slab(local.sizes(), new_dim)), out_counts);
  return {work, [in, out, sizes, old_dim, extents = counts_of(held, 1)] { return unpack(out, sizes, old_dim, extents); }};
}

at::Tensor slice(const at::Tensor& tensor, const RedistributionStep& step) {
  const std::vector<Chunk> chunks = peer_chunks(step.to, step.axis);
  const Chunk& mine = chunks[static_cast<size_t>(coordinate_of(step))];
  return tensor.narrow(target(step).dim(), mine.offset, mine.size);
}

at::Tensor to_partial(const at::Tensor& local, const RedistributionStep& step) {
  if (coordinate_of(step) == 0) {
    return local;
  }
  switch (target(step).op()) {
    case ReduceOp::kSum:
      return at::zeros_like(local);
    case ReduceOp::kProduct:
      return at::ones_like(local);
    default:
      return local;
  }
}

at::Tensor rescale(const at::Tensor& local, const RedistributionStep& step) {
  const auto ranks = static_cast<double>(group_of(step).size());
  return source(step).op() == ReduceOp::kSum ? local.mul(ranks) : local.div(ranks);
}

StepRun start_step(const at::Tensor& local, const RedistributionStep& step) {
  switch (step.kind) {
    case Kind::kAllReduce:
      return start_all_reduce(local, step, [](at::Tensor whole) { return whole; });
    case Kind::kAllReduceSlice:
      return start_all_reduce(local, step, [step](const at::Tensor& whole) { return slice(whole, step).clone(); });
    case Kind::kReduceScatter:
      return start_reduce_scatter(local, step);
    case Kind::kAllGather:
      return start_all_gather(local, step);
    case Kind::kAllToAll:
      return start_all_to_all(local, step);
    case Kind::kSlice:
      return done(slice(local, step));
    case Kind::kToPartial:
      return done(to_partial(local, step));
    case Kind::kRescale:
      return done(rescale(local, step));
  }
  throw Error("redistribute: unknown step");
}

} // namespace

at::Tensor run_steps(const at::Tensor& local, const std::vector<RedistributionStep>& steps, bool may_alias) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::Tensor current = local;
  for (const RedistributionStep& step : steps) {
    StepRun run = start_step(current, step);
    if (run.work) {
      run.work->wait();
    }
    current = run.finish();
  }
  if (!steps.empty()) {
    current = match_layout(current, steps.back().to);
  }
  if (!may_alias && current.defined() && current.is_alias_of(local)) {
    current = current.clone();
  }
  return current;
}

struct PendingTensor::State {
  at::Tensor source; // kept alive
  SpecPtr to = nullptr;
  std::vector<RedistributionStep> steps;
  StepRun first; // of steps[0]; unused when there is none
};

PendingTensor::PendingTensor(std::unique_ptr<State> state) : state_(std::move(state)) {}
PendingTensor::PendingTensor(PendingTensor&&) noexcept = default;
PendingTensor& PendingTensor::operator=(PendingTensor&&) noexcept = default;
PendingTensor::~PendingTensor() = default;

at::Tensor PendingTensor::wait() {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const std::unique_ptr<State> state = std::move(state_);
  if (state->steps.empty()) {
    return wrap_local(state->source.clone(), state->to);
  }
  if (state->first.work) {
    state->first.work->wait();
  }
  const at::Tensor current = match_layout(state->first.finish(), state->steps[0].to);
  state->steps.erase(state->steps.begin());
  at::Tensor result = run_steps(current, state->steps, true);
  if (result.is_alias_of(state->source)) {
    result = result.clone();
  }
  return wrap_local(std::move(result), state->to);
}

PendingTensor redistribute_async(const at::Tensor& tensor, const Placements& placements) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto state = std::make_unique<PendingTensor::State>();
  state->source = local_of(tensor);
  state->to = with_placements(spec_of(tensor), placements);
  state->steps = plan_redistribution(spec_of(tensor), state->to, CostModel());
  if (!state->steps.empty()) {
    state->first = start_step(state->source, state->steps[0]);
  }
  return PendingTensor(std::move(state));
}

} // namespace tessera
