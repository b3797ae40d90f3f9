// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/local_cut.h>
#include <tessera/optim/reduced_gradient.h>
#include <tessera/sharding/redistribution.h>

#include <span>
#include <utility>
#include <vector>

namespace tessera {
namespace {

using Kind = RedistributionStep::Kind;

} // namespace

void ReducedGradient::plan(SpecPtr from, SpecPtr to) {
  if (plan_.from == from && plan_.to == to) {
    return;
  }
  plan_ = {
      from,
      to,
      plan_redistribution(
          from, with_placements(from, to->placements), CostModel())};
  std::erase_if(plan_.steps, [&](const RedistributionStep& step) {
    return from->mesh.size(step.axis) == 1;
  });
}

bool ReducedGradient::is_of(const at::Tensor& gradient) const {
  if (!source_) {
    return false;
  }
  const auto source = source_->lock();
  return source.get() == gradient.unsafeGetTensorImpl() &&
      source_version_ == local_of(gradient)._version();
}

void ReducedGradient::start(const at::Tensor& gradient, SpecPtr target) {
  const SpecPtr from = spec_of(gradient);
  source_.reset();
  spec_ = target;
  gradient_ = gradient;
  plan(from, target);
  if (plan_.steps.empty()) {
    local_ = local_of(gradient);
    return;
  }
  const RedistributionStep& step = plan_.steps.front();
  const Placement& before = from->placements[static_cast<size_t>(step.axis)];
  const bool is_reduction = plan_.steps.size() == 1 && before.is_partial();
  const auto cut = is_reduction && step.kind == Kind::kReduceScatter
      ? flat_cut(*from, *target)
      : std::nullopt;
  if (cut) {
    reduce_flat(from->mesh.group(step.axis), before.op(), cut->counts);
  } else if (
      is_reduction &&
      (step.kind == Kind::kAllReduce || step.kind == Kind::kAllReduceSlice)) {
    reduce_whole(*from, from->mesh.group(step.axis), before.op());
  } else {
    pending_.emplace(redistribute_async(gradient, target->placements));
  }
}

void ReducedGradient::reduce_flat(
    const Group& group, ReduceOp op, c10::ArrayRef<int64_t> counts) {
  input_ = local_of(gradient_).contiguous();
  resize_buffer(spec_->local_sizes);
  work_ = group.reduce_scatter(
      input_, buffer_, std::span(counts.data(), counts.size()), op);
  local_ = buffer_;
}

void ReducedGradient::reduce_whole(
    const TensorSpec& from, const Group& group, ReduceOp op) {
  resize_buffer(from.local_sizes);
  buffer_.copy_(local_of(gradient_));
  work_ = group.all_reduce(buffer_, op);
  local_ = cut_local(buffer_, from, *spec_);
}

void ReducedGradient::wait() {
  if (work_) {
    std::exchange(work_, nullptr)->wait();
  }
  if (pending_) {
    local_ = local_of(pending_->wait());
    pending_.reset();
  }
  const at::Tensor& unreduced = local_of(gradient_);
  local_ = local_.contiguous();
  owns_local_ = !local_.is_alias_of(unreduced);
  source_.emplace(gradient_.getIntrusivePtr());
  source_version_ = unreduced._version();
  gradient_.reset();
  input_.reset();
}

void ReducedGradient::scale(double factor) {
  local_ = owns_local_ ? local_.mul_(factor) : local_.mul(factor);
  owns_local_ = true;
}

void ReducedGradient::cut(double limit) {
  local_ =
      owns_local_ ? local_.clamp_(-limit, limit) : local_.clamp(-limit, limit);
  owns_local_ = true;
}

int64_t ReducedGradient::buffer_bytes() const {
  return buffer_.defined() ? static_cast<int64_t>(buffer_.nbytes()) : 0;
}

void ReducedGradient::resize_buffer(c10::IntArrayRef sizes) {
  const at::Tensor& like = local_of(gradient_);
  if (!buffer_.defined() || buffer_.sizes() != sizes ||
      buffer_.scalar_type() != like.scalar_type()) {
    buffer_ = at::empty(sizes, like.options());
  }
}

} // namespace tessera
