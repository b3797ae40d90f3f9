// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/coalesced.h>

#include <utility>

namespace tessera {
namespace {

// The part of `flat` that belongs to each of the tensors, in order.
template <typename Visit>
void for_each_part(
    const at::Tensor& flat,
    const std::vector<at::Tensor>& tensors,
    const Visit& visit) {
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    visit(tensor, flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// Copies the results back once.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(WorkPtr inner, at::Tensor flat, std::vector<at::Tensor> tensors)
      : inner_(std::move(inner)),
        flat_(std::move(flat)),
        tensors_(std::move(tensors)) {}

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  std::vector<at::Tensor> result() override {
    return tensors_;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    const std::scoped_lock lock(mutex_);
    if (done && flat_.defined()) {
      for_each_part(flat_, tensors_, [](const auto& tensor, const auto& part) {
        at::Tensor(tensor).copy_(part);
      });
      flat_.reset();
    }
    return done;
  }

 private:
  WorkPtr inner_;
  at::Tensor flat_;
  std::vector<at::Tensor> tensors_;
};

} // namespace

WorkPtr all_reduce_coalesced(
    const Group& group, std::vector<at::Tensor> tensors, ReduceOp op) {
  if (tensors.empty()) {
    throw UsageError("all_reduce_coalesced: got no tensor, expected some");
  }
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.scalar_type() != tensors.front().scalar_type()) {
      throw UsageError(fmt::format(
          "all_reduce_coalesced: got {} and {}, expected one dtype; call once "
          "per dtype",
          c10::toString(tensors.front().scalar_type()),
          c10::toString(tensor.scalar_type())));
    }
    numel += tensor.numel();
  }
  const at::Tensor flat = group.allocate({numel}, tensors.front().options());
  for_each_part(flat, tensors, [](const auto& tensor, const auto& part) {
    at::Tensor(part).copy_(tensor);
  });
  return c10::make_intrusive<CoalescedWork>(
      group.all_reduce(flat, op), flat, std::move(tensors));
}

} // namespace tessera
