// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/dtensor.h>
#include <tessera/optim/local_cut.h>
#include <tessera/optim/parameter_part.h>

#include <span>
#include <utility>

namespace tessera {

ParameterPart::ParameterPart(const at::Tensor& parameter, SpecPtr part)
    : parameter_(parameter), part_(part) {
  const TensorSpec& whole = *spec_of(parameter);
  if (is_cut_of(*part, whole)) {
    local_ = cut_local(local_of(parameter), whole, *part).contiguous();
  } else {
    local_ = local_of(redistribute(parameter, part->placements)).contiguous();
  }
}

void ParameterPart::start_return() {
  const TensorSpec& whole = *spec_of(parameter_);
  const at::Tensor& target = local_of(parameter_);
  if (part_->placements == whole.placements) {
    return;
  }
  const auto cut = flat_cut(whole, *part_);
  if (cut && target.is_contiguous()) {
    // The part lies where the gather puts it.
    work_ = whole.mesh.group(cut->axis).all_gather(
        local_, target, std::span<const int64_t>(cut->counts));
  } else {
    pending_.emplace(
        redistribute_async(wrap_local(local_, part_), whole.placements));
  }
}

void ParameterPart::finish_return() {
  const at::Tensor& target = local_of(parameter_);
  if (work_) {
    std::exchange(work_, nullptr)->wait();
  } else if (pending_) {
    target.copy_(local_of(pending_->wait()));
    pending_.reset();
  } else if (!local_.is_alias_of(target)) {
    target.copy_(local_);
  }
  parameter_.unsafeGetTensorImpl()->bump_version();
}

} // namespace tessera
