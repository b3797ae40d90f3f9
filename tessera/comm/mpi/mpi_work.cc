// SPDX-License-Identifier: Apache-2.0
#include <tessera/comm/mpi/mpi_progress.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/mpi/mpi_work.h>

namespace tessera {

MpiWork::MpiWork(std::shared_ptr<MpiGroup> group, MpiOperationPtr operation)
    : c10d::Work(group->rank(), operation->type),
      group_(std::move(group)),
      operation_(std::move(operation)) {}

bool MpiWork::isCompleted() {
  return group_->test(*operation_);
}

bool MpiWork::isSuccess() const {
  const std::scoped_lock lock(operation_->mutex);
  return operation_->done && !operation_->error;
}

std::exception_ptr MpiWork::exception() const {
  const std::scoped_lock lock(operation_->mutex);
  return operation_->error;
}

std::vector<at::Tensor> MpiWork::result() {
  return operation_->results;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout == kNoTimeout ? group_->timeout() : timeout;
  if (!group_->wait(*operation_, limit)) {
    group_->time_out(*operation_, limit);
  }
  if (const auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

uint64_t MpiWork::getSequencenumber() const {
  return operation_->seq;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  const std::scoped_lock lock(mutex_);
  if (!future_) {
    if (mpi_has_one_thread()) {
      group_->wait(*operation_, group_->timeout());
    }
    future_ = follow_mpi_operation(group_, operation_);
  }
  return future_;
}

} // namespace tessera
