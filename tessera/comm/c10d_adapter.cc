// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/c10d_adapter.h>
#include <tessera/comm/group_impl.h>

#include <atomic>
#include <functional>
#include <numeric>

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

// Several Works as one, and what follows when all are done.
class ChainedWork : public c10d::Work {
 public:
  ChainedWork(std::vector<WorkPtr> works, std::function<void()> last)
      : works_(std::move(works)), last_(std::move(last)) {}

  bool isCompleted() override {
    for (const WorkPtr& work : works_) {
      if (!work->isCompleted()) {
        return false;
      }
    }
    if (isSuccess()) {
      finish_once();
    }
    return true;
  }
  bool isSuccess() const override {
    return exception() == nullptr;
  }
  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : works_) {
      work->wait(timeout);
    }
    finish_once();
    return true;
  }

 private:
  void finish_once() {
    const std::scoped_lock lock(mutex_);
    if (last_) {
      std::exchange(last_, nullptr)();
    }
  }

  std::vector<WorkPtr> works_;
  std::function<void()> last_;
};

WorkPtr chained(std::vector<WorkPtr> works, std::function<void()> last) {
  auto chain =
      c10::make_intrusive<ChainedWork>(std::move(works), std::move(last));
  if (chain->isCompleted() && chain->isSuccess()) {
    return done_work();
  }
  return chain;
}

} // namespace

WorkPtr then(WorkPtr work, std::function<void()> last) {
  return chained({std::move(work)}, std::move(last));
}

namespace {

WorkPtr all_of(std::vector<WorkPtr> works) {
  return chained(std::move(works), [] {});
}

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
          "backend: this reduction is not supported; use sum, avg, min, "
          "max or product");
  }
}

const at::Tensor& checked(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() ||
      !tensor.is_contiguous()) {
    throw UsageError(
        "backend: expected a contiguous CPU tensor; call contiguous() or "
        "copy it first");
  }
  return tensor;
}

const at::Tensor& only(const Tensors& tensors) {
  if (tensors.size() != 1) {
    throw UsageError(fmt::format(
        "backend: got {} tensors, expected one per call", tensors.size()));
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

class CollectivesBackend : public c10d::Backend {
 public:
  CollectivesBackend(
      std::string name,
      std::shared_ptr<Collectives> collectives,
      int64_t rank,
      int64_t size)
      : c10d::Backend(static_cast<int>(rank), static_cast<int>(size)),
        name_(std::move(name)),
        collectives_(std::move(collectives)) {}

  const std::string getBackendName() const override {
    return name_;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return counted(collectives_->broadcast(only(tensors), options.rootRank));
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return counted(collectives_->all_reduce(
        only(tensors), reduce_op_of(options.reduceOp)));
  }

  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<WorkPtr> works;
    for (const at::Tensor& tensor : tensors) {
      works.push_back(counted(collectives_->all_reduce(
          checked(tensor), reduce_op_of(options.reduceOp))));
    }
    return all_of(std::move(works));
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    const at::Tensor reduced =
        options.rootRank == rank_ ? tensor : tensor.clone();
    return then(
        counted(
            collectives_->all_reduce(reduced, reduce_op_of(options.reduceOp))),
        [reduced] {}); // lives until then
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& /*options*/) override {
    const at::Tensor& in = only(inputs);
    const Tensors& parts = outputs.at(0);
    const at::Tensor flat = at::empty({total(parts)}, in.options());
    return then(
        counted(collectives_->all_gather(in, flat, counts_of(parts))),
        [flat, parts] { unflatten(flat, parts); });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& /*options*/) override {
    const std::vector<int64_t> counts(
        static_cast<std::size_t>(size_), input.numel());
    check_total(output, input.numel() * size_, "all_gather output");
    return counted(
        collectives_->all_gather(checked(input), checked(output), counts));
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(_allgather_base(outputs.at(i), inputs[i], options));
    }
    return all_of(std::move(works));
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& options) override {
    const at::Tensor& in = only(inputs);
    std::vector<int64_t> in_counts(static_cast<std::size_t>(size_), 0);
    std::vector<int64_t> out_counts(static_cast<std::size_t>(size_), 0);
    in_counts.at(static_cast<std::size_t>(options.rootRank)) = in.numel();
    Tensors parts;
    if (rank_ == options.rootRank) {
      parts = outputs.at(0);
      out_counts = counts_of(parts);
    }
    const at::Tensor flat = at::empty(
        {std::accumulate(out_counts.begin(), out_counts.end(), int64_t{0})},
        in.options());
    return then(
        counted(collectives_->all_to_all(in, flat, in_counts, out_counts)),
        [flat, parts] { unflatten(flat, parts); });
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
    return then(
        counted(collectives_->all_to_all(flat, out, in_counts, out_counts)),
        [flat] {});
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    const Tensors& parts = inputs.at(0);
    const at::Tensor flat = flattened(parts);
    return then(
        counted(collectives_->reduce_scatter(
            flat,
            only(outputs),
            counts_of(parts),
            reduce_op_of(options.reduceOp))),
        [flat] {});
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    const std::vector<int64_t> counts(
        static_cast<std::size_t>(size_), output.numel());
    check_total(input, output.numel() * size_, "reduce_scatter input");
    return counted(collectives_->reduce_scatter(
        checked(input),
        checked(output),
        counts,
        reduce_op_of(options.reduceOp)));
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(_reduce_scatter_base(outputs.at(i), inputs[i], options));
    }
    return all_of(std::move(works));
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_rows,
      std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& /*options*/) override {
    return counted(collectives_->all_to_all(
        checked(input),
        checked(output),
        split_counts(input, input_rows, size_),
        split_counts(output, output_rows, size_)));
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& /*options*/) override {
    const at::Tensor in = flattened(inputs);
    const at::Tensor out = at::empty({total(outputs)}, in.options());
    return then(
        counted(collectives_->all_to_all(
            in, out, counts_of(inputs), counts_of(outputs))),
        [in, out, outputs] { unflatten(out, outputs); });
  }

  c10::intrusive_ptr<c10d::Work> send(
      Tensors& tensors, int peer, int tag) override {
    return collectives_->send(only(tensors), peer, tag);
  }

  c10::intrusive_ptr<c10d::Work> recv(
      Tensors& tensors, int peer, int tag) override {
    return collectives_->recv(only(tensors), peer, tag);
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& /*options*/) override {
    return counted(collectives_->barrier());
  }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return collectives_->allocate({size}, options);
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    c10::Allocator* const own = collectives_->allocator();
    return {
        own != nullptr ? own : c10::GetAllocator(c10::DeviceType::CPU),
        [](c10::Allocator*) {}}; // both live as long as the process
  }

  uint64_t getSequenceNumberForGroup() override {
    return seq_;
  }
  void setSequenceNumberForGroup() override {} // every group begins at zero
  void abort() override {
    collectives_->abort("the backend was aborted");
  }
  void shutdown() override {
    collectives_->leave();
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

  WorkPtr counted(WorkPtr work) {
    ++seq_;
    return work;
  }

  std::string name_;
  std::shared_ptr<Collectives> collectives_;
  std::atomic<uint64_t> seq_ = 0; // collectives called through this object
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_c10d_backend(
    const std::string& name,
    std::shared_ptr<Collectives> collectives,
    int64_t rank,
    int64_t size) {
  return c10::make_intrusive<CollectivesBackend>(
      name, std::move(collectives), rank, size);
}

} // namespace tessera
