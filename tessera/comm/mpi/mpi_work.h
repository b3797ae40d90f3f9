// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/mpi/mpi_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

namespace tessera {

// An MpiOperation as c10d sees it. wait() takes the group's timeout when it is
// given none. Dropping it does not stop the operation.
class MpiWork : public c10d::Work {
 public:
  MpiWork(std::shared_ptr<MpiGroup> group, MpiOperationPtr operation);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  uint64_t getSequencenumber() const override;
  // Moved on by a thread of its own from the first call on. Where MPI has one
  // thread only, this blocks until the operation is done.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<MpiGroup> group_;
  MpiOperationPtr operation_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace tessera
