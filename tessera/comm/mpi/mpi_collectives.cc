// SPDX-License-Identifier: Apache-2.0
// Collectives over MPI-3's non-blocking ones.
//
// Counts. MPI-3 counts elements in an int. A call that has more is made of
// several: all_reduce and broadcast of pieces; reduce_scatter and all_gather,
// whose displacements would not fit either, of one reduction or broadcast per
// rank and piece. All ranks see the same counts, so all cut alike. all_to_all
// has no count that all ranks know, so one rank could not tell that another
// must cut; it is always made of sends and receives, which is also what the
// libraries do for it.
//
// Reductions happen where the library wants them, in the dtype of the data,
// except averages of integers, bfloat16 and float16, which are summed in int64
// or float32 and rounded once. The rest of a sum in bfloat16 or float16 rounds
// once per pair. The order is MPI's choice: the same for the same number of
// ranks and elements in practice, but not the order of the ranks, so the last
// bits may differ from shm's and gloo's.
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/c10d_adapter.h>
#include <tessera/comm/counts.h>
#include <tessera/comm/mpi/mpi_collectives.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/mpi/mpi_types.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

std::size_t bytes_of_element(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.element_size());
}

// Where element `index` lies. Never null: MPI takes no null, even of no bytes.
std::byte* place(const at::Tensor& tensor, int64_t index = 0) {
  static std::byte nothing;
  auto* data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  return data == nullptr
      ? &nothing
      : data + index * static_cast<int64_t>(tensor.element_size());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const std::byte*>(b.const_data_ptr());
  return a.nbytes() > 0 && b.nbytes() > 0 && a_begin < b_begin + b.nbytes() &&
      b_begin < a_begin + a.nbytes();
}

// MPI forbids that input and output overlap.
at::Tensor apart(const at::Tensor& in, const at::Tensor& out) {
  return overlap(in, out) ? in.detach().clone() : in;
}

std::vector<int> as_ints(std::span<const int64_t> values) {
  std::vector<int> ints;
  ints.reserve(values.size());
  for (const int64_t value : values) {
    ints.push_back(static_cast<int>(value));
  }
  return ints;
}

// The dtype that a reduction runs in.
at::ScalarType working_dtype(at::ScalarType dtype, ReduceOp op) {
  if (op != ReduceOp::kAvg) {
    return dtype;
  }
  if (dtype == at::kBFloat16 || dtype == at::kHalf) {
    return at::kFloat;
  }
  return at::isIntegralType(dtype, /*includeBool=*/false) ? at::kLong : dtype;
}

template <typename T>
void divide(const at::Tensor& tensor, int64_t divisor) {
  auto* data = static_cast<T*>(tensor.mutable_data_ptr());
  const auto ranks = static_cast<T>(divisor);
  std::for_each(
      data, data + tensor.numel(), [ranks](T& value) { value /= ranks; });
}

// What is left of a reduction when MPI is done: `worked` holds its result.
void settle(
    const at::Tensor& worked,
    const at::Tensor& out,
    ReduceOp op,
    int64_t ranks) {
  if (op == ReduceOp::kAvg && worked.scalar_type() == at::kFloat) {
    divide<float>(worked, ranks);
  } else if (op == ReduceOp::kAvg && worked.scalar_type() == at::kDouble) {
    divide<double>(worked, ranks);
  } else if (op == ReduceOp::kAvg) {
    divide<int64_t>(worked, ranks);
  }
  if (worked.scalar_type() != out.scalar_type()) {
    out.detach().copy_(worked.view(out.sizes()));
  }
}

class MpiCollectives : public Collectives {
 public:
  explicit MpiCollectives(std::shared_ptr<MpiGroup> group)
      : group_(std::move(group)) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override;
  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override;
  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override;
  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override;
  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override;
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override;
  WorkPtr barrier() override;

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return make_c10d_backend(
        "mpi",
        std::make_shared<MpiCollectives>(group_),
        group_->rank(),
        group_->size());
  }
  void abort(const std::string& reason) override {
    group_->abort_job(reason);
  }
  void leave() override {} // MPI has no word for it; peers time out

 private:
  // Calls post(begin, count) for every piece of `count` elements, count an int.
  template <typename Post>
  void by_pieces(int64_t count, Post&& post) const {
    for (int64_t begin = 0; begin < count; begin += group_->max_count()) {
      post(
          begin,
          static_cast<int>(std::min(group_->max_count(), count - begin)));
    }
  }
  void scatter_reduced(
      MpiOperation& call,
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) const;
  void transfer(
      MpiOperation& call,
      const at::Tensor& tensor,
      int peer,
      int tag,
      bool sends) const;
  WorkPtr message(const at::Tensor& tensor, int64_t peer, int tag, bool sends);

  std::shared_ptr<MpiGroup> group_;
};

WorkPtr MpiCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const auto call =
      group_->begin(CollectiveKind::kAllReduce, c10d::OpType::ALLREDUCE);
  const auto dtype = working_dtype(tensor.scalar_type(), op);
  const at::Tensor worked = tensor.detach().to(dtype); // itself where it can be
  call->results = {tensor};
  call->held = {worked};
  call->last = [worked, tensor, op, ranks = group_->size()] {
    settle(worked, tensor, op, ranks);
  };
  return group_->start(call, [&] {
    by_pieces(worked.numel(), [&](int64_t begin, int count) {
      check_mpi(
          MPI_Iallreduce(
              MPI_IN_PLACE,
              place(worked, begin),
              count,
              mpi_type_for_reducing(dtype),
              mpi_op(dtype, op),
              group_->communicator(),
              call->next_request()),
          call->where);
    });
  });
}

WorkPtr MpiCollectives::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) {
  const auto call = group_->begin(
      CollectiveKind::kReduceScatter, c10d::OpType::REDUCE_SCATTER);
  const auto dtype = working_dtype(in.scalar_type(), op);
  const at::Tensor source = apart(in.detach().to(dtype), out);
  const at::Tensor worked = dtype == out.scalar_type()
      ? out.detach()
      : at::empty(out.sizes(), out.options().dtype(dtype));
  call->results = {out};
  call->held = {source, worked};
  call->last = [worked, out, op, ranks = group_->size()] {
    settle(worked, out, op, ranks);
  };
  return group_->start(call, [&] {
    if (sum_of(counts) > group_->max_count()) {
      return scatter_reduced(*call, source, worked, counts, op);
    }
    if (sum_of(counts) == 0) {
      return;
    }
    call->counts = as_ints(counts);
    check_mpi(
        MPI_Ireduce_scatter(
            place(source),
            place(worked),
            call->counts.data(),
            mpi_type_for_reducing(dtype),
            mpi_op(dtype, op),
            group_->communicator(),
            call->next_request()),
        call->where);
  });
}

void MpiCollectives::scatter_reduced(
    MpiOperation& call,
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) const {
  const std::vector<int64_t> starts = starts_of(counts);
  for (int root = 0; root < group_->size(); ++root) {
    const auto index = static_cast<std::size_t>(root);
    by_pieces(counts[index], [&](int64_t begin, int count) {
      check_mpi(
          MPI_Ireduce(
              place(in, starts[index] + begin),
              root == group_->rank() ? place(out, begin) : nullptr,
              count,
              mpi_type_for_reducing(in.scalar_type()),
              mpi_op(in.scalar_type(), op),
              root,
              group_->communicator(),
              call.next_request()),
          call.where);
    });
  }
}

WorkPtr MpiCollectives::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) {
  const auto call =
      group_->begin(CollectiveKind::kAllGather, c10d::OpType::ALLGATHER);
  call->results = {out};
  const std::vector<int64_t> starts = starts_of(counts);
  const auto own = static_cast<std::size_t>(group_->rank());
  if (in.nbytes() > 0) {
    std::memmove(place(out, starts[own]), in.const_data_ptr(), in.nbytes());
  }
  const int64_t total = sum_of(counts);
  return group_->start(call, [&] {
    const MPI_Datatype type = mpi_type_for_moving(bytes_of_element(out));
    if (total > 0 && total <= group_->max_count()) {
      call->counts = as_ints(counts);
      call->starts = as_ints(starts);
      check_mpi(
          MPI_Iallgatherv(
              MPI_IN_PLACE,
              0,
              MPI_DATATYPE_NULL,
              place(out),
              call->counts.data(),
              call->starts.data(),
              type,
              group_->communicator(),
              call->next_request()),
          call->where);
      return;
    }
    for (int root = 0; root < group_->size(); ++root) {
      const auto index = static_cast<std::size_t>(root);
      by_pieces(counts[index], [&](int64_t begin, int count) {
        check_mpi(
            MPI_Ibcast(
                place(out, starts[index] + begin),
                count,
                type,
                root,
                group_->communicator(),
                call->next_request()),
            call->where);
      });
    }
  });
}

WorkPtr MpiCollectives::all_to_all(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> in_counts,
    std::span<const int64_t> out_counts) {
  const auto call =
      group_->begin(CollectiveKind::kAllToAll, c10d::OpType::ALLTOALL);
  const auto own = static_cast<std::size_t>(group_->rank());
  if (in_counts[own] != out_counts[own]) {
    throw UsageError(fmt::format(
        "{}: this rank gives itself {} elements and takes {}; counts must "
        "match",
        call->where,
        in_counts[own],
        out_counts[own]));
  }
  const at::Tensor source = apart(in, out);
  call->results = {out};
  call->held = {source};
  const std::vector<int64_t> in_starts = starts_of(in_counts);
  const std::vector<int64_t> out_starts = starts_of(out_counts);
  std::memcpy(
      place(out, out_starts[own]),
      place(source, in_starts[own]),
      static_cast<std::size_t>(in_counts[own]) * bytes_of_element(in));
  return group_->start(call, [&] {
    const int tag = group_->max_tag() + 1;
    const int size = group_->size();
    for (const bool sends : {false, true}) {
      for (int distance = 1; distance < size; ++distance) {
        const int peer =
            (group_->rank() + (sends ? distance : size - distance)) % size;
        const auto index = static_cast<std::size_t>(peer);
        const auto part = sends ? source.detach().view({-1}).narrow(
                                      0, in_starts[index], in_counts[index])
                                : out.detach().view({-1}).narrow(
                                      0, out_starts[index], out_counts[index]);
        if (part.numel() > 0) {
          transfer(*call, part, peer, tag, sends);
        }
      }
    }
  });
}

WorkPtr MpiCollectives::broadcast(const at::Tensor& tensor, int64_t root) {
  const auto call =
      group_->begin(CollectiveKind::kBroadcast, c10d::OpType::BROADCAST);
  call->results = {tensor};
  return group_->start(call, [&] {
    by_pieces(tensor.numel(), [&](int64_t begin, int count) {
      check_mpi(
          MPI_Ibcast(
              place(tensor, begin),
              count,
              mpi_type_for_moving(bytes_of_element(tensor)),
              static_cast<int>(root),
              group_->communicator(),
              call->next_request()),
          call->where);
    });
  });
}

// One tensor to or from a peer. Receives of a call come before its sends.
void MpiCollectives::transfer(
    MpiOperation& call,
    const at::Tensor& tensor,
    int peer,
    int tag,
    bool sends) const {
  const MPI_Datatype type = mpi_type_for_moving(bytes_of_element(tensor));
  const auto post = [&](int64_t begin, int count) {
    MPI_Request* request = call.next_request();
    std::byte* data = place(tensor, begin);
    const MPI_Comm communicator = group_->communicator();
    check_mpi(
        sends ? MPI_Isend(data, count, type, peer, tag, communicator, request)
              : MPI_Irecv(data, count, type, peer, tag, communicator, request),
        call.where);
  };
  if (tensor.numel() == 0) {
    post(0, 0);
  }
  by_pieces(tensor.numel(), post);
  if (!sends) {
    call.receives = call.requests.size();
    call.expected_bytes += static_cast<int64_t>(tensor.nbytes());
  }
}

WorkPtr MpiCollectives::message(
    const at::Tensor& tensor, int64_t peer, int tag, bool sends) {
  const auto call = group_->begin(
      sends ? CollectiveKind::kSend : CollectiveKind::kRecv,
      sends ? c10d::OpType::SEND : c10d::OpType::RECV);
  call->peer = peer;
  call->where +=
      fmt::format(" {} rank {}, tag {}", sends ? "to" : "from", peer, tag);
  if (tag < 0 || tag > group_->max_tag()) {
    throw UsageError(fmt::format(
        "{}: expected a tag of 0 to {}", call->where, group_->max_tag()));
  }
  call->results = {tensor};
  return group_->start(call, [&] {
    transfer(*call, tensor, static_cast<int>(peer), tag, sends);
  });
}

WorkPtr MpiCollectives::send(const at::Tensor& tensor, int64_t peer, int tag) {
  return message(tensor, peer, tag, true);
}

WorkPtr MpiCollectives::recv(const at::Tensor& tensor, int64_t peer, int tag) {
  return message(tensor, peer, tag, false);
}

WorkPtr MpiCollectives::barrier() {
  const auto call =
      group_->begin(CollectiveKind::kBarrier, c10d::OpType::BARRIER);
  return group_->start(call, [&] {
    check_mpi(
        MPI_Ibarrier(group_->communicator(), call->next_request()),
        call->where);
  });
}

} // namespace

std::unique_ptr<Collectives> make_mpi_collectives(
    std::shared_ptr<MpiGroup> group) {
  return std::make_unique<MpiCollectives>(std::move(group));
}

} // namespace tessera
