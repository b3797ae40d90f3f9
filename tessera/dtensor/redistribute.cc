// SPDX-License-Identifier: Apache-2.0
//
// Executing a redistribution. `plan_redistribution` says by which single-axis
// steps a tensor goes; here each step becomes at most one collective on the
// axis's group, and the packing around it.
//
// A collective moves flat buffers laid out peer after peer. Where the cut dim
// is the outermost one with more than one element, a contiguous tensor already
// is such a buffer and nothing is packed; otherwise the pieces for each peer
// are copied together, and what arrives is put side by side along the dim.
// Where the pieces lie is `step_layout`'s business: uneven and empty ones need
// no care.
#include <tessera/dtensor/redistribute.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <tessera/base/error.h>
#include <tessera/comm/profiler_range.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/layout.h>

#include <functional>
#include <numeric>
#include <optional>
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

// Whether a contiguous tensor's memory is already cut along `dim`, piece after
// piece.
bool outermost(c10::IntArrayRef sizes, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) {
    if (sizes[static_cast<size_t>(d)] != 1) {
      return false;
    }
  }
  return true;
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Whether the pieces lie one after the other, from the start.
bool in_order(const std::vector<Chunk>& pieces) {
  int64_t next = 0;
  for (const Chunk& piece : pieces) {
    if (piece.size > 0 && piece.offset != next) {
      return false;
    }
    next += piece.size;
  }
  return true;
}

int64_t covered(const std::vector<Chunk>& pieces) {
  int64_t sum = 0;
  for (const Chunk& piece : pieces) {
    sum += piece.size;
  }
  return sum;
}

// The tensor's pieces along `dim`, each contiguous, one after the other in a
// flat buffer.
at::Tensor pack(
    const at::Tensor& tensor, int64_t dim, const std::vector<Chunk>& pieces) {
  const bool whole = in_order(pieces) && covered(pieces) == tensor.size(dim);
  if (whole && outermost(tensor.sizes(), dim)) {
    return tensor.contiguous().view(-1);
  }
  std::vector<at::Tensor> parts;
  parts.reserve(pieces.size());
  for (const Chunk& piece : pieces) {
    parts.push_back(
        tensor.narrow(dim, piece.size == 0 ? 0 : piece.offset, piece.size)
            .reshape(-1));
  }
  return at::cat(parts);
}

// The inverse: `flat` holds the pieces of a tensor of shape `sizes`.
at::Tensor unpack(
    const at::Tensor& flat,
    c10::IntArrayRef sizes,
    int64_t dim,
    const std::vector<Chunk>& pieces) {
  if (in_order(pieces) && outermost(sizes, dim)) {
    return flat.view(sizes);
  }
  at::Tensor result = at::empty(sizes, flat.options());
  int64_t offset = 0;
  for (const Chunk& piece : pieces) {
    if (piece.size == 0) {
      continue;
    }
    at::Tensor part = result.narrow(dim, piece.offset, piece.size);
    part.copy_(flat.narrow(0, offset, part.numel()).view(part.sizes()));
    offset += part.numel();
  }
  return result;
}

// A dense copy that the collective may write into, seen flat. Its layout stays
// the tensor's where that is dense.
StepRun start_all_reduce(
    const at::Tensor& local,
    const RedistributionStep& step,
    std::function<at::Tensor(at::Tensor)> then) {
  at::Tensor copy = local.clone();
  if (!copy.is_non_overlapping_and_dense()) {
    copy = copy.contiguous();
  }
  at::Tensor flat = copy.is_contiguous() ? copy.view(-1)
                                         : copy.as_strided({copy.numel()}, {1});
  WorkPtr work = group_of(step).all_reduce(flat, source(step).op());
  return {work, [copy, flat, then = std::move(then)] { return then(copy); }};
}

StepRun start_reduce_scatter(
    const at::Tensor& local, const RedistributionStep& step) {
  const StepLayout layout = step_layout(step);
  at::Tensor in = pack(local, layout.send_dim, layout.send);
  at::Tensor out = at::empty(step.to->local_sizes, local.options());
  WorkPtr work = group_of(step).reduce_scatter(
      in, out.view(-1), layout.send_counts, source(step).op());
  return {work, [in, out] { return out; }};
}

StepRun start_all_gather(
    const at::Tensor& local, const RedistributionStep& step) {
  StepLayout layout = step_layout(step);
  at::Tensor in = local.contiguous().view(-1);
  at::Tensor out = at::empty({total(layout.recv_counts)}, local.options());
  WorkPtr work = group_of(step).all_gather(in, out, layout.recv_counts);
  return {work, [in, out, step, layout] {
            return unpack(
                out, step.to->local_sizes, layout.recv_dim, layout.recv);
          }};
}

StepRun start_all_to_all(
    const at::Tensor& local, const RedistributionStep& step) {
  StepLayout layout = step_layout(step);
  at::Tensor in = pack(local, layout.send_dim, layout.send);
  at::Tensor out = at::empty({total(layout.recv_counts)}, local.options());
  WorkPtr work = group_of(step).all_to_all(
      in, out, layout.send_counts, layout.recv_counts);
  return {work, [in, out, step, layout] {
            return unpack(
                out, step.to->local_sizes, layout.recv_dim, layout.recv);
          }};
}

at::Tensor slice(const at::Tensor& tensor, const RedistributionStep& step) {
  const StepLayout layout = step_layout(step);
  const Chunk& mine = layout.send[static_cast<size_t>(coordinate_of(step))];
  return tensor.narrow(
      layout.send_dim, mine.size == 0 ? 0 : mine.offset, mine.size);
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
  return source(step).op() == ReduceOp::kSum ? local.mul(ranks)
                                             : local.div(ranks);
}

StepRun start_step(const at::Tensor& local, const RedistributionStep& step) {
  switch (step.kind) {
    case Kind::kAllReduce:
      return start_all_reduce(
          local, step, [](at::Tensor whole) { return whole; });
    case Kind::kAllReduceSlice:
      return start_all_reduce(local, step, [step](const at::Tensor& whole) {
        return slice(whole, step).clone();
      });
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
    case Kind::kRelabel:
      return done(local.view(step.to->local_sizes));
  }
  throw Error("redistribute: unknown step");
}

} // namespace

at::Tensor run_steps(
    const at::Tensor& local,
    const std::vector<RedistributionStep>& steps,
    bool may_alias) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::Tensor current = local;
  std::optional<ProfilerRange> range;
  if (!steps.empty()) {
    range.emplace("redistribute");
  }
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

void run_steps_into(
    const at::Tensor& local,
    const std::vector<RedistributionStep>& steps,
    const at::Tensor& destination) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (steps.size() == 1 && steps[0].kind == Kind::kAllGather) {
    const StepLayout layout = step_layout(steps[0]);
    if (destination.is_contiguous() && in_order(layout.recv) &&
        outermost(destination.sizes(), layout.recv_dim)) {
      const ProfilerRange range("redistribute");
      group_of(steps[0])
          .all_gather(
              local.contiguous().view(-1),
              destination.view(-1),
              layout.recv_counts)
          ->wait();
      return;
    }
  }
  destination.copy_(run_steps(local, steps, true));
}

struct PendingTensor::State {
  at::Tensor source; // kept alive
  SpecPtr to = nullptr;
  std::vector<RedistributionStep> steps;
  StepRun first; // of steps[0]; unused when there is none
};

PendingTensor::PendingTensor(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
PendingTensor::PendingTensor(PendingTensor&&) noexcept = default;
PendingTensor& PendingTensor::operator=(PendingTensor&&) noexcept = default;
PendingTensor::~PendingTensor() = default;

at::Tensor PendingTensor::wait() {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const std::unique_ptr<State> state = std::move(state_);
  if (state->steps.empty()) {
    return wrap_local(state->source.clone(), state->to);
  }
  if (state->first.work) {
    state->first.work->wait();
  }
  const at::Tensor current =
      match_layout(state->first.finish(), state->steps[0].to);
  state->steps.erase(state->steps.begin());
  at::Tensor result = run_steps(current, state->steps, true);
  if (result.is_alias_of(state->source)) {
    result = result.clone();
  }
  return wrap_local(std::move(result), state->to);
}

PendingTensor redistribute_async(
    const at::Tensor& tensor, const Placements& placements) {
  c10::impl::ExcludeDispatchKeyGuard guard(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto state = std::make_unique<PendingTensor::State>();
  state->source = local_of(tensor);
  state->to = with_placements(spec_of(tensor), placements);
  state->steps = plan_redistribution(spec_of(tensor), state->to, CostModel());
  if (!state->steps.empty()) {
    const ProfilerRange range("redistribute");
    state->first = start_step(state->source, state->steps[0]);
  }
  return PendingTensor(std::move(state));
}

} // namespace tessera
