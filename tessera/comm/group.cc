// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/counts.h>
#include <tessera/comm/group_checks.h>
#include <tessera/comm/group_impl.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/profiler_range.h>
#include <tessera/comm/record_impl.h>
#include <tessera/comm/timed_work.h>
#include <tessera/comm/work_watch.h>

#include <atomic>
#include <chrono>
#include <cstring>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

class DoneWork : public c10d::Work {
 public:
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    return true;
  }
};

// Tells the other ranks' watches, and the file's name to the error. A failure
// that was found to be another's is told already.
template <typename Failure>
[[noreturn]] void rethrow_failure(
    const Failure& error,
    const std::shared_ptr<PeerWatch>& peers,
    RecordImpl& record,
    const RecordImpl::Ticket& ticket) {
  const std::string text = error.what();
  if (peers) {
    peers->fail(text);
  }
  throw Failure(text + "; " + record.failed(ticket, text));
}

// Rethrows what a call of the group threw. An error that the peers have to do
// with also says where this rank's calls were written.
[[noreturn]] void rethrow_recorded(
    const std::shared_ptr<PeerWatch>& peers,
    RecordImpl& record,
    const RecordImpl::Ticket& ticket) {
  try {
    throw;
  } catch (const TimeoutError& error) {
    rethrow_failure(error, peers, record, ticket);
  } catch (const PeerError& error) {
    rethrow_failure(error, peers, record, ticket);
  } catch (...) {
    record.ended(ticket, CallState::kFailed);
    throw;
  }
}

// Adds the time spent in wait() to the event that the issue recorded.
class RecordedWork : public c10d::Work {
 public:
  // A call on a device ends when the device says so, not when its queue has
  // been told to wait.
  RecordedWork(
      WorkPtr inner,
      const GroupImpl& group,
      CollectiveKind kind,
      const RecordImpl::Ticket& ticket)
      : inner_(std::move(inner)),
        record_(group.record),
        status_(group.status),
        peers_(group.peers),
        kind_(kind),
        ticket_(ticket) {
    auto* on_device = dynamic_cast<DeviceWork*>(inner_.get());
    if (on_device != nullptr) {
      ends_by_itself_ = true;
      on_device->when_done([record = record_, ticket] {
        record->impl().ended(ticket, CallState::kCompleted);
      });
    }
  }

  bool isCompleted() override {
    const bool completed = inner_->isCompleted();
    if (completed && !ended_ && !ends_by_itself_ && inner_->isSuccess()) {
      record_->impl().ended(ticket_, CallState::kCompleted);
      ended_ = true;
    }
    return completed;
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  std::vector<at::Tensor> result() override {
    return inner_->result();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner_->getFuture();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const WaitMark mark(status_.get());
    const ProfilerRange range(kind_, "wait");
    const auto start = Clock::now();
    bool done = false;
    try {
      done = inner_->wait(timeout);
    } catch (...) {
      rethrow_recorded(peers_, record_->impl(), ticket_);
    }
    record_->impl().waited(
        ticket_, start, busy_seconds_once(), !ends_by_itself_);
    ended_ = true;
    return done;
  }

 private:
  double busy_seconds_once() {
    const auto* const timed = dynamic_cast<const TimedWork*>(inner_.get());
    return timed == nullptr || counted_.exchange(true) ? 0
                                                       : timed->busy_seconds();
  }

  WorkPtr inner_;
  std::shared_ptr<Record> record_;
  std::shared_ptr<RankStatus> status_;
  std::shared_ptr<PeerWatch> peers_;
  CollectiveKind kind_;
  RecordImpl::Ticket ticket_;
  bool ends_by_itself_ = false;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> counted_ = false;
};

// Runs one collective or message of more than one rank and records it.
template <typename Call>
WorkPtr recorded(
    const GroupImpl& group,
    bool in_background,
    const CallDescription& description,
    int64_t bytes,
    Call&& call,
    int32_t tag = 0) {
  const WaitMark mark(group.status.get());
  const ProfilerRange range(description.kind, group.name);
  const auto start = Clock::now();
  RecordImpl& record = group.record->impl();
  RecordImpl::Ticket ticket =
      record.begin(group.record_group, description, tag, start);
  WorkPtr work;
  try {
    work = call(
        in_background ? group.collectives->background() : *group.collectives);
  } catch (...) {
    rethrow_recorded(group.peers, record, ticket);
  }
  const bool done = work->isCompleted() && work->isSuccess();
  record.issued(
      ticket, group.record_group, description.kind, bytes, start, done);
  if (done) {
    return work;
  }
  return c10::make_intrusive<RecordedWork>(
      std::move(work), group, description.kind, ticket);
}

CallDescription call_with_root(
    CollectiveKind kind, const at::Tensor& tensor, int64_t root) {
  return {
      .kind = kind,
      .dtype = tensor.scalar_type(),
      .root = root,
      .shape = tensor.sizes()};
}

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// A group of one: what a rank sends itself.
WorkPtr copy_to_self(const at::Tensor& in, const at::Tensor& out) {
  if (in.data_ptr() == out.data_ptr() || in.numel() == 0) {
    return done_work();
  }
  if (in.is_cpu()) {
    std::memcpy(out.data_ptr(), in.const_data_ptr(), in.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    out.view({-1}).copy_(in.view({-1}));
  }
  return done_work();
}

} // namespace

WorkPtr done_work() {
  return c10::make_intrusive<DoneWork>();
}

int64_t Group::rank() const {
  return impl_->rank;
}

int64_t Group::size() const {
  return static_cast<int64_t>(impl_->world_ranks.size());
}

const std::string& Group::name() const {
  return impl_->name;
}

const std::vector<int64_t>& Group::world_ranks() const {
  return impl_->world_ranks;
}

const std::string& Group::backend_name() const {
  return impl_->backend_name;
}

c10::Device Group::device() const {
  return impl_->device;
}

c10::intrusive_ptr<c10d::Backend> Group::backend() const {
  if (!impl_->collectives) {
    return nullptr;
  }
  return in_background_ ? impl_->collectives->background().backend()
                        : impl_->collectives->backend();
}

Group Group::background() const {
  return Group(impl_, /*in_background=*/true);
}

at::Tensor Collectives::allocate(
    at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

WorkPtr Collectives::with_peers(
    std::span<const at::Tensor> /*lent*/,
    // As those that keep it take it.
    // NOLINTNEXTLINE(performance-unnecessary-value-param)
    std::function<void(PeerBuffers)> /*body*/) {
  throw UsageError(
      "with_peers: got a backend whose ranks cannot use each other's memory, "
      "expected shm; ask can_lend first");
}

at::Tensor Group::allocate(
    at::IntArrayRef sizes, const at::TensorOptions& options) const {
  const at::TensorOptions here =
      options.has_device() ? options : options.device(impl_->device);
  return impl_->collectives ? impl_->collectives->allocate(sizes, here)
                            : at::empty(sizes, here);
}

WorkPtr Group::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  constexpr auto kKind = CollectiveKind::kAllReduce;
  check_tensor(*impl_, kKind, tensor);
  check_reduction(*impl_, kKind, tensor, op);
  if (size() == 1) {
    return done_work();
  }
  const CallDescription call{
      .kind = kKind,
      .dtype = tensor.scalar_type(),
      .op = op,
      .shape = tensor.sizes()};
  return recorded(
      *impl_, in_background_, call, bytes_of(tensor), [&](Collectives& c) {
        return c.all_reduce(tensor, op);
      });
}

WorkPtr Group::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) const {
  constexpr auto kKind = CollectiveKind::kReduceScatter;
  check_tensor(*impl_, kKind, in);
  check_tensor(*impl_, kKind, out);
  check_reduction(*impl_, kKind, in, op);
  check_dtypes(*impl_, kKind, in, out);
  check_counts(*impl_, kKind, "counts", counts, in.numel());
  check_own_part(*impl_, kKind, out, counts);
  if (size() == 1) {
    return copy_to_self(in, out);
  }
  const CallDescription call{
      .kind = kKind, .dtype = in.scalar_type(), .op = op, .counts = counts};
  return recorded(
      *impl_, in_background_, call, bytes_of(in), [&](Collectives& c) {
        return c.reduce_scatter(in, out, counts, op);
      });
}

WorkPtr Group::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) const {
  constexpr auto kKind = CollectiveKind::kAllGather;
  check_tensor(*impl_, kKind, in);
  check_tensor(*impl_, kKind, out);
  check_dtypes(*impl_, kKind, in, out);
  check_counts(*impl_, kKind, "counts", counts, out.numel());
  check_own_part(*impl_, kKind, in, counts);
  if (size() == 1) {
    return copy_to_self(in, out);
  }
  const CallDescription call{
      .kind = kKind, .dtype = in.scalar_type(), .counts = counts};
  return recorded(
      *impl_, in_background_, call, bytes_of(out), [&](Collectives& c) {
        return c.all_gather(in, out, counts);
      });
}

WorkPtr Group::all_to_all(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> in_counts,
    std::span<const int64_t> out_counts) const {
  constexpr auto kKind = CollectiveKind::kAllToAll;
  check_tensor(*impl_, kKind, in);
  check_tensor(*impl_, kKind, out);
  check_dtypes(*impl_, kKind, in, out);
  check_counts(*impl_, kKind, "in_counts", in_counts, in.numel());
  check_counts(*impl_, kKind, "out_counts", out_counts, out.numel());
  if (size() == 1) {
    return copy_to_self(in, out);
  }
  const CallDescription call{
      .kind = kKind,
      .dtype = in.scalar_type(),
      .counts = in_counts,
      .out_counts = out_counts};
  return recorded(
      *impl_, in_background_, call, bytes_of(in), [&](Collectives& c) {
        return c.all_to_all(in, out, in_counts, out_counts);
      });
}

WorkPtr Group::broadcast(const at::Tensor& tensor, int64_t root) const {
  constexpr auto kKind = CollectiveKind::kBroadcast;
  check_tensor(*impl_, kKind, tensor);
  check_peer(*impl_, kKind, root);
  if (size() == 1) {
    return done_work();
  }
  return recorded(
      *impl_,
      in_background_,
      call_with_root(kKind, tensor, root),
      bytes_of(tensor),
      [&](Collectives& c) { return c.broadcast(tensor, root); });
}

WorkPtr Group::send(const at::Tensor& tensor, int64_t peer, int tag) const {
  constexpr auto kKind = CollectiveKind::kSend;
  check_tensor(*impl_, kKind, tensor);
  check_peer(*impl_, kKind, peer);
  if (peer == rank()) {
    refuse(*impl_, kKind, "a rank cannot send to itself");
  }
  return recorded(
      *impl_,
      in_background_,
      call_with_root(kKind, tensor, peer),
      bytes_of(tensor),
      [&](Collectives& c) { return c.send(tensor, peer, tag); },
      tag);
}

WorkPtr Group::recv(const at::Tensor& tensor, int64_t peer, int tag) const {
  constexpr auto kKind = CollectiveKind::kRecv;
  check_tensor(*impl_, kKind, tensor);
  check_peer(*impl_, kKind, peer);
  if (peer == rank()) {
    refuse(*impl_, kKind, "a rank cannot receive from itself");
  }
  return recorded(
      *impl_,
      in_background_,
      call_with_root(kKind, tensor, peer),
      bytes_of(tensor),
      [&](Collectives& c) { return c.recv(tensor, peer, tag); },
      tag);
}

WorkPtr Group::barrier() const {
  if (size() == 1) {
    return done_work();
  }
  const CallDescription call{
      .kind = CollectiveKind::kBarrier, .shape = at::IntArrayRef{}};
  return recorded(*impl_, in_background_, call, 0, [](Collectives& c) {
    return c.barrier();
  });
}

bool Group::can_lend(std::span<const at::Tensor> tensors) const {
  return impl_->device.is_cpu() &&
      (!impl_->collectives || impl_->collectives->can_lend(tensors));
}

WorkPtr Group::with_peers(
    std::span<const at::Tensor> lent,
    std::function<void(PeerBuffers)> body) const {
  constexpr auto kKind = CollectiveKind::kWithPeers;
  if (lent.empty() || lent.size() > kMaxLent) {
    refuse(
        *impl_,
        kKind,
        fmt::format("got {} tensors, expected 1 or 2", lent.size()));
  }
  std::vector<int64_t> bytes;
  for (const at::Tensor& tensor : lent) {
    check_tensor(*impl_, kKind, tensor);
    bytes.push_back(bytes_of(tensor));
  }
  if (size() == 1) {
    std::vector<std::byte*> places;
    std::vector<std::span<std::byte* const>> buffers;
    for (const at::Tensor& tensor : lent) {
      places.push_back(static_cast<std::byte*>(tensor.mutable_data_ptr()));
    }
    buffers.reserve(places.size());
    for (std::byte* const& place : places) {
      buffers.emplace_back(&place, 1);
    }
    body(buffers);
    return done_work();
  }
  const CallDescription call{.kind = kKind, .shape = bytes};
  return recorded(
      *impl_, in_background_, call, sum_of(bytes), [&](Collectives& c) {
        return c.with_peers(lent, std::move(body));
      });
}

} // namespace tessera
