// SPDX-License-Identifier: Apache-2.0
#include <tessera/comm/shm_c10d.h>

namespace tessera {
namespace {

class TransferWork : public c10d::Work {
 public:
  TransferWork(std::shared_ptr<ShmEngine> engine, ShmTransferPtr transfer)
      : c10d::Work(
            -1, transfer->outgoing ? c10d::OpType::SEND : c10d::OpType::RECV),
        engine_(std::move(engine)),
        transfer_(std::move(transfer)) {}

  bool isCompleted() override {
    if (error_) {
      return true;
    }
    try {
      return engine_->poll(*transfer_);
    } catch (...) {
      error_ = std::current_exception();
      return true;
    }
  }

  bool isSuccess() const override {
    return !error_;
  }
  std::exception_ptr exception() const override {
    return error_;
  }
  int sourceRank() const override {
    return static_cast<int>(transfer_->peer);
  }
  std::vector<at::Tensor> result() override {
    return {transfer_->tensor};
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (error_) {
      std::rethrow_exception(error_);
    }
    engine_->finish(*transfer_);
    return true;
  }

 private:
  std::shared_ptr<ShmEngine> engine_;
  ShmTransferPtr transfer_;
  std::exception_ptr error_;
};

} // namespace

WorkPtr shm_send(
    const std::shared_ptr<ShmEngine>& engine,
    const at::Tensor& tensor,
    int64_t peer,
    int tag) {
  return c10::make_intrusive<TransferWork>(
      engine, engine->start_send(tensor, peer, tag));
}

WorkPtr shm_recv(
    const std::shared_ptr<ShmEngine>& engine,
    const at::Tensor& tensor,
    int64_t peer,
    int tag) {
  return c10::make_intrusive<TransferWork>(
      engine, engine->start_recv(tensor, peer, tag));
}

} // namespace tessera
