// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/group_impl.h>
#include <tessera/comm/shm_c10d.h>

#include <numeric>

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

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

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    default:
      throw UsageError(
          "shm backend: this reduction is not supported; use sum, avg, min, "
          "max or product");
  }
}

const at::Tensor& checked(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() ||
      !tensor.is_contiguous()) {
    throw UsageError(
        "shm backend: expected a contiguous CPU tensor; call contiguous() or "
        "copy it first");
  }
  return tensor;
}

const at::Tensor& only(const Tensors& tensors) {
  if (tensors.size() != 1) {
    throw UsageError(fmt::format(
        "shm backend: got {} tensors, expected one per call", tensors.size()));
  }
  return checked(tensors.front());
}

std::vector<int64_t> counts_of(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& tensor : tensors) {
    counts.push_back(tensor.numel());
  }
  return counts;
}

at::Tensor flattened(const Tensors& tensors) {
  Tensors flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.reshape({-1}));
  }
  return at::cat(flat);
}

void unflatten(const at::Tensor& flat, const Tensors& tensors) {
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// c10d gives counts in rows of dim 0, or none for equal parts.
std::vector<int64_t> split_counts(
    const at::Tensor& tensor, const std::vector<int64_t>& rows, int64_t size) {
  if (rows.empty()) {
    if (tensor.dim() == 0 || tensor.size(0) % size != 0) {
      throw UsageError(fmt::format(
          "all_to_all: dim 0 does not split evenly over {} ranks; give the "
          "split sizes",
          size));
    }
    return std::vector<int64_t>(
        static_cast<std::size_t>(size), tensor.numel() / size);
  }
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (static_cast<int64_t>(rows.size()) != size || tensor.dim() == 0 ||
      total != tensor.size(0)) {
    throw UsageError(
        "all_to_all: the split sizes do not add up to dim 0, or are not one "
        "per rank");
  }
  std::vector<int64_t> counts;
  counts.reserve(rows.size());
  for (const int64_t row : rows) {
    counts.push_back(
        tensor.size(0) == 0 ? 0 : row * (tensor.numel() / tensor.size(0)));
  }
  return counts;
}

class ShmC10dBackend : public c10d::Backend {
 public:
  ShmC10dBackend(std::shared_ptr<ShmEngine> engine, int64_t rank, int64_t size)
      : c10d::Backend(static_cast<int>(rank), static_cast<int>(size)),
        engine_(std::move(engine)) {}

  const std::string getBackendName() const override {
    return "shm";
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    engine_->broadcast(only(tensors), options.rootRank);
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    engine_->all_reduce(only(tensors), reduce_op_of(options.reduceOp));
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    for (const at::Tensor& tensor : tensors) {
      engine_->all_reduce(checked(tensor), reduce_op_of(options.reduceOp));
    }
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    const at::Tensor reduced =
        options.rootRank == rank_ ? tensor : tensor.clone();
    engine_->all_reduce(reduced, reduce_op_of(options.reduceOp));
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& /*options*/) override {
    const at::Tensor& in = only(inputs);
    const Tensors& parts = outputs.at(0);
    const at::Tensor flat = at::empty({total(parts)}, in.options());
    engine_->all_gather(in, flat, counts_of(parts));
    unflatten(flat, parts);
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& /*options*/) override {
    const std::vector<int64_t> counts(
        static_cast<std::size_t>(size_), input.numel());
    check_total(output, input.numel() * size_, "all_gather output");
    engine_->all_gather(checked(input), checked(output), counts);
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      _allgather_base(outputs.at(i), inputs[i], options);
    }
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& options) override {
    const at::Tensor& in = only(inputs);
    std::vector<int64_t> in_counts(static_cast<std::size_t>(size_), 0);
    std::vector<int64_t> out_counts(static_cast<std::size_t>(size_), 0);
    in_counts.at(static_cast<std::size_t>(options.rootRank)) = in.numel();
    if (rank_ == options.rootRank) {
      out_counts = counts_of(outputs.at(0));
    }
    const at::Tensor flat = at::empty(
        {std::accumulate(out_counts.begin(), out_counts.end(), int64_t{0})},
        in.options());
    engine_->all_to_all(in, flat, in_counts, out_counts);
    if (rank_ == options.rootRank) {
      unflatten(flat, outputs.at(0));
    }
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    const at::Tensor& out = only(outputs);
    const bool root = rank_ == options.rootRank;
    std::vector<int64_t> in_counts(static_cast<std::size_t>(size_), 0);
    std::vector<int64_t> out_counts(static_cast<std::size_t>(size_), 0);
    out_counts.at(static_cast<std::size_t>(options.rootRank)) = out.numel();
    at::Tensor flat = at::empty({0}, out.options());
    if (root) {
      in_counts = counts_of(inputs.at(0));
      flat = flattened(inputs.at(0));
    }
    engine_->all_to_all(flat, out, in_counts, out_counts);
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    const Tensors& parts = inputs.at(0);
    engine_->reduce_scatter(
        flattened(parts),
        only(outputs),
        counts_of(parts),
        reduce_op_of(options.reduceOp));
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    const std::vector<int64_t> counts(
        static_cast<std::size_t>(size_), output.numel());
    check_total(input, output.numel() * size_, "reduce_scatter input");
    engine_->reduce_scatter(
        checked(input),
        checked(output),
        counts,
        reduce_op_of(options.reduceOp));
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      _reduce_scatter_base(outputs.at(i), inputs[i], options);
    }
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_rows,
      std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& /*options*/) override {
    engine_->all_to_all(
        checked(input),
        checked(output),
        split_counts(input, input_rows, size_),
        split_counts(output, output_rows, size_));
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& /*options*/) override {
    const at::Tensor in = flattened(inputs);
    const at::Tensor out = at::empty({total(outputs)}, in.options());
    engine_->all_to_all(in, out, counts_of(inputs), counts_of(outputs));
    unflatten(out, outputs);
    return done_work();
  }

  c10::intrusive_ptr<c10d::Work> send(
      Tensors& tensors, int peer, int tag) override {
    return shm_send(engine_, only(tensors), peer, tag);
  }

  c10::intrusive_ptr<c10d::Work> recv(
      Tensors& tensors, int peer, int tag) override {
    return shm_recv(engine_, only(tensors), peer, tag);
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& /*options*/) override {
    engine_->barrier();
    return done_work();
  }

  uint64_t getSequenceNumberForGroup() override {
    return engine_->seq();
  }
  void setSequenceNumberForGroup() override {} // every group begins at zero
  void abort() override {
    engine_->abort("the backend was aborted");
  }
  void shutdown() override {
    engine_->leave();
  }

 private:
  static int64_t total(const Tensors& tensors) {
    const auto counts = counts_of(tensors);
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }

  static void check_total(
      const at::Tensor& tensor, int64_t expected, const char* what) {
    if (tensor.numel() != expected) {
      throw UsageError(fmt::format(
          "{}: got {} elements, expected {}", what, tensor.numel(), expected));
    }
  }

  std::shared_ptr<ShmEngine> engine_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_shm_c10d_backend(
    std::shared_ptr<ShmEngine> engine, int64_t rank, int64_t size) {
  return c10::make_intrusive<ShmC10dBackend>(std::move(engine), rank, size);
}

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
