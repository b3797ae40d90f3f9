// SPDX-License-Identifier: Apache-2.0
// Collectives over libtorch's NCCL.
//
// Reductions and movements of data are NCCL's own; a work's wait() makes the
// device's current stream wait. What NCCL does not have is done around it:
// - Data moves as bytes, of whatever dtype.
// - 16-bit integers, and averages of integers, are reduced as 64-bit ones.
// - send and recv go through the CPU, over the group's calls there: NCCL's
//   block until the peer comes, so that ranks which all send first would wait
//   in a circle, and they know no tags. An exchange in which all ranks take
//   part is faster as all_to_all.
// - barrier is one of the ranks, not of their devices.
// - Failures: see work_watch.h. libtorch's own watchdog, which would end the
//   process without a word about who is behind it, is told to stay out.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/c10d_adapter.h>
#include <tessera/comm/devices.h>
#include <tessera/comm/nccl/nccl_plugin.h>
#include <tessera/comm/peer_failure.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/work_watch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>
#include <vector>

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using Counts = std::span<const int64_t>;

// The watch above is to come first.
constexpr auto kAfterTheWatch = std::chrono::minutes(1);

class Nccl : public c10d::ProcessGroupNCCL {
 public:
  explicit Nccl(const GroupSetup& setup)
      : ProcessGroupNCCL(
            setup.store,
            static_cast<int>(setup.rank),
            static_cast<int>(setup.size()),
            options_for(setup)) {
    asyncErrorHandling_ = c10d::NoHandling;
  }

 private:
  static c10::intrusive_ptr<Options> options_for(const GroupSetup& setup) {
    auto options = Options::create();
    options->timeout = setup.timeout + kAfterTheWatch;
    options->group_name = setup.id;
    return options;
  }
};

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return flat(tensor).view(at::kByte);
}

Tensors slices(const at::Tensor& whole, Counts counts) {
  Tensors parts;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    parts.push_back(whole.narrow(0, begin, count));
    begin += count;
  }
  return parts;
}

std::vector<int64_t> in_bytes(Counts counts, const at::Tensor& tensor) {
  std::vector<int64_t> bytes(counts.begin(), counts.end());
  for (int64_t& count : bytes) {
    count *= static_cast<int64_t>(tensor.element_size());
  }
  return bytes;
}

bool is_even(Counts counts) {
  return std::ranges::all_of(
      counts, [&](int64_t count) { return count == counts.front(); });
}

c10d::ReduceOp reduce_op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  throw UsageError("nccl: unknown reduction; use one of ReduceOp");
}

bool goes_wide(const at::Tensor& tensor, ReduceOp op) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
      (tensor.scalar_type() == at::kShort || op == ReduceOp::kAvg);
}

class NcclCollectives : public Collectives {
 public:
  explicit NcclCollectives(const GroupSetup& setup);
  ~NcclCollectives() override;
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      Counts counts,
      ReduceOp op) override;
  WorkPtr all_gather(
      const at::Tensor& in, const at::Tensor& out, Counts counts) override;
  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      Counts in_counts,
      Counts out_counts) override;
  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override;
  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override;
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override;
  WorkPtr barrier() override;

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return nccl_;
  }
  void abort(const std::string& reason) override {
    host_->abort(reason);
    watch_.fail(reason);
  }
  void leave() override {
    host_->leave();
    end_once();
  }

 private:
  std::string group_text() const {
    return fmt::format("[rank {}/{}, group {}", rank_, size_, name_);
  }
  WorkPtr start(
      CollectiveKind kind,
      const std::function<WorkPtr()>& issue,
      std::function<void()> last = {});
  WorkPtr issue_reduce_scatter(
      const at::Tensor& in, const at::Tensor& out, Counts counts, ReduceOp op);
  void finish_wide(at::Tensor wide, const at::Tensor& out, ReduceOp op) const;
  WorkWatchOptions watch_options();
  [[noreturn]] void give_up(const std::string& error) const;
  void end_once();

  int64_t rank_;
  int64_t size_;
  std::string name_;
  c10::Device device_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Collectives> host_;
  std::shared_ptr<Record> record_;
  std::shared_ptr<PeerWatch> peers_;
  std::shared_ptr<PeerFailure> failure_;
  uint64_t listener_ = 0;
  std::atomic<uint64_t> seq_ = 0;
  std::atomic<bool> ended_ = false;
  c10::intrusive_ptr<Nccl> nccl_;
  WorkWatch watch_; // its thread uses the others
};

NcclCollectives::NcclCollectives(const GroupSetup& setup)
    : rank_(setup.rank),
      size_(setup.size()),
      name_(setup.name),
      device_(setup.device),
      timeout_(setup.timeout),
      host_(setup.host),
      record_(setup.record),
      peers_(setup.peers),
      failure_(std::make_shared<PeerFailure>(setup, "nccl")),
      nccl_(c10::make_intrusive<Nccl>(setup)),
      watch_(watch_options()) {
  if (peers_) {
    listener_ = peers_->add_listener([this](int64_t world_rank) {
      if (failure_->in_group(world_rank)) {
        watch_.fail(
            "nccl " + group_text() + "]: " + failure_->end_of(world_rank));
      }
    });
  }
}

NcclCollectives::~NcclCollectives() {
  if (peers_) {
    peers_->remove_listener(listener_);
  }
  end_once();
}

// A communicator that has failed cannot be left in an orderly way.
void NcclCollectives::end_once() {
  if (!ended_.exchange(true)) {
    watch_.failed() ? nccl_->abort() : nccl_->shutdown();
  }
}

WorkWatchOptions NcclCollectives::watch_options() {
  return {
      .timeout = timeout_,
      .explain =
          [failure = failure_](
              const FailedCall& call, const std::exception& error) {
            return failure->explain(call, error);
          },
      .stop = [this] { nccl_->abort(); },
      .give_up = [this](const std::string& error) { give_up(error); }};
}

void NcclCollectives::give_up(const std::string& error) const {
  std::string text = error +
      "; the program waits for its device and cannot be told, so it ends here";
  try {
    text += "; this rank's calls are in " + record_->write_calls(error);
  } catch (const std::exception& unwritten) {
    text += "; this rank's calls could not be written: " + brief(unwritten);
  }
  std::fputs((text + "\n").c_str(), stderr);
  std::_Exit(EXIT_FAILURE);
}

WorkPtr NcclCollectives::start(
    CollectiveKind kind,
    const std::function<WorkPtr()>& issue,
    std::function<void()> last) {
  const uint64_t seq = ++seq_;
  failure_->note(kind, seq);
  const c10::DeviceGuard guard(device_);
  return watch_.start(
      {.where = fmt::format("{} {}, seq {}]", name_of(kind), group_text(), seq),
       .seq = seq},
      issue,
      std::move(last));
}

// Integers that were reduced as 64-bit ones.
void NcclCollectives::finish_wide(
    at::Tensor wide, const at::Tensor& out, ReduceOp op) const {
  if (op == ReduceOp::kAvg) {
    wide.div_(size_, "trunc");
  }
  flat(out).copy_(wide);
}

WorkPtr NcclCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const bool wide = goes_wide(tensor, op);
  Tensors one{wide ? flat(tensor).to(at::kLong) : flat(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp =
      reduce_op_of(wide && op == ReduceOp::kAvg ? ReduceOp::kSum : op);
  std::function<void()> last;
  if (wide) {
    last = [this, sum = one.front(), tensor, op] {
      finish_wide(sum, tensor, op);
    };
  }
  return start(
      CollectiveKind::kAllReduce,
      [&] { return nccl_->allreduce(one, options); },
      std::move(last));
}

WorkPtr NcclCollectives::issue_reduce_scatter(
    const at::Tensor& in, const at::Tensor& out, Counts counts, ReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op_of(op);
  if (is_even(counts)) {
    at::Tensor whole = in;
    at::Tensor part = out;
    return nccl_->_reduce_scatter_base(part, whole, options);
  }
  Tensors part{out};
  std::vector<Tensors> parts{slices(in, counts)};
  return nccl_->reduce_scatter(part, parts, options);
}

WorkPtr NcclCollectives::reduce_scatter(
    const at::Tensor& in, const at::Tensor& out, Counts counts, ReduceOp op) {
  constexpr auto kKind = CollectiveKind::kReduceScatter;
  if (!goes_wide(in, op)) {
    return start(kKind, [&] {
      return issue_reduce_scatter(flat(in), flat(out), counts, op);
    });
  }
  const at::Tensor sum =
      at::empty({out.numel()}, out.options().dtype(at::kLong));
  return start(
      kKind,
      [&] {
        return issue_reduce_scatter(
            flat(in).to(at::kLong),
            sum,
            counts,
            op == ReduceOp::kAvg ? ReduceOp::kSum : op);
      },
      [this, sum, out, op] { finish_wide(sum, out, op); });
}

WorkPtr NcclCollectives::all_gather(
    const at::Tensor& in, const at::Tensor& out, Counts counts) {
  at::Tensor part = bytes_of(in);
  at::Tensor whole = bytes_of(out);
  return start(CollectiveKind::kAllGather, [&]() -> WorkPtr {
    if (is_even(counts)) {
      return nccl_->_allgather_base(whole, part, {});
    }
    Tensors one{part};
    std::vector<Tensors> parts{slices(whole, in_bytes(counts, out))};
    return nccl_->allgather(parts, one, {});
  });
}

WorkPtr NcclCollectives::all_to_all(
    const at::Tensor& in,
    const at::Tensor& out,
    Counts in_counts,
    Counts out_counts) {
  const auto own = static_cast<std::size_t>(rank_);
  if (in_counts[own] != out_counts[own]) {
    throw UsageError(fmt::format(
        "all_to_all {}]: this rank gives itself {} elements and takes {}; "
        "counts must match",
        group_text(),
        in_counts[own],
        out_counts[own]));
  }
  at::Tensor gives = bytes_of(in);
  at::Tensor takes = bytes_of(out);
  std::vector<int64_t> give_counts = in_bytes(in_counts, in);
  std::vector<int64_t> take_counts = in_bytes(out_counts, out);
  return start(CollectiveKind::kAllToAll, [&] {
    return nccl_->alltoall_base(takes, gives, take_counts, give_counts, {});
  });
}

WorkPtr NcclCollectives::broadcast(const at::Tensor& tensor, int64_t root) {
  Tensors one{bytes_of(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return start(CollectiveKind::kBroadcast, [&] {
    return nccl_->broadcast(one, options);
  });
}

// The copy waits for what the device's current stream has to do before.
WorkPtr NcclCollectives::send(const at::Tensor& tensor, int64_t peer, int tag) {
  const at::Tensor copy = flat(tensor).cpu();
  return then(host_->send(copy, peer, tag), [copy] {}); // lives until then
}

WorkPtr NcclCollectives::recv(const at::Tensor& tensor, int64_t peer, int tag) {
  const at::Tensor received =
      at::empty({tensor.numel()}, tensor.options().device(at::kCPU));
  return then(host_->recv(received, peer, tag), [received, out = flat(tensor)] {
    out.copy_(received);
  });
}

WorkPtr NcclCollectives::barrier() {
  return host_->barrier();
}

void compare_gpus(const GroupSetup& setup) {
  GpuCard own{.pid = getpid()};
  const auto* properties = at::cuda::getDeviceProperties(setup.device.index());
  std::memcpy(own.uuid.data(), properties->uuid.bytes, own.uuid.size());
  copy_text(own.host.data(), own.host.size(), host_name());
  constexpr auto kBytes = static_cast<int64_t>(sizeof(GpuCard));
  const at::Tensor mine = at::empty({kBytes}, at::kByte);
  const at::Tensor all = at::empty({kBytes * setup.size()}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof(GpuCard));
  const std::vector<int64_t> each(
      static_cast<std::size_t>(setup.size()), kBytes);
  setup.host->all_gather(mine, all, each)->wait();
  std::vector<GpuCard> cards(each.size());
  std::memcpy(cards.data(), all.const_data_ptr(), all.nbytes());
  check_own_gpus(
      fmt::format(
          "new_group [rank {}/{}, group {}]",
          setup.rank,
          setup.size(),
          setup.name),
      cards);
}

std::unique_ptr<Collectives> make_nccl_collectives(const GroupSetup& setup) {
  compare_gpus(setup);
  const c10::DeviceGuard guard(setup.device);
  return std::make_unique<NcclCollectives>(setup);
}

} // namespace
} // namespace tessera

extern "C" const tessera::NcclPlugin* tessera_nccl_plugin() {
  static const tessera::NcclPlugin plugin{
      .header = {}, .make_group = tessera::make_nccl_collectives};
  return &plugin;
}
