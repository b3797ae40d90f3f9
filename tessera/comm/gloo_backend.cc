// SPDX-License-Identifier: Apache-2.0
// Collectives over gloo, made of its sends and receives.
//
// Gloo's own reduce_scatter and all_gather take twice as long as its
// all_reduce, and its collectives run on a fixed number of worker threads that
// block. Its sends and receives do neither: they are handed to the sockets'
// event loop at once, any number at a time. So every collective here is a set
// of direct transfers between pairs of ranks, all started in the call, and what
// is left to compute runs when they have arrived (gloo_progress.h):
//   all_gather, all_to_all, barrier: one exchange.
//   reduce_scatter: one exchange of the parts, then each reduces its own.
//   all_reduce of little data: one exchange of everything, then each reduces
//     everything. Else a reduce_scatter and an all_gather, which moves
//     2 (n-1)/n of the data per rank instead of n-1.
//   broadcast: down a binomial tree: a receive from the parent, then sends to
//     the children.
// Reductions go in the order of the ranks, so that all have the same bits, and
// know bfloat16 and float16, which gloo would reduce in half precision.
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/gloo_backend.h>
#include <tessera/comm/gloo_progress.h>
#include <tessera/comm/peer_failure.h>
#include <tessera/comm/peer_watch.h>
#include <tessera/comm/reduce_kernels.h>
#include <tessera/comm/store.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera {
namespace {

constexpr int kFirstTag = 1 << 30; // tags of collectives lie above the users'
// all_reduce in one exchange up to here; two ranks move no less by parts, but
// reduce and buffer half as much.
constexpr int64_t kWholeBytes = 64 << 10;
constexpr int64_t kWholeBytesOfTwo = 512 << 10;

using Tensors = std::vector<at::Tensor>;

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

Tensors slices(const at::Tensor& tensor, std::span<const int64_t> counts) {
  const at::Tensor whole = flat(tensor);
  Tensors parts;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    parts.push_back(whole.narrow(0, begin, count));
    begin += count;
  }
  return parts;
}

void copy_own(const at::Tensor& from, const at::Tensor& to) {
  if (from.numel() > 0 && from.const_data_ptr() != to.const_data_ptr()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  }
}

// A send or receive of the user: waits in the caller's thread.
class MessageWork : public c10d::Work {
 public:
  MessageWork(
      FailedCall call,
      WorkPtr inner,
      std::shared_ptr<PeerFailure> failure,
      std::chrono::milliseconds timeout)
      : call_(std::move(call)),
        inner_(std::move(inner)),
        failure_(std::move(failure)),
        timeout_(timeout) {
    failure_->add_message(inner_.get());
  }
  ~MessageWork() override {
    failure_->remove_message(inner_.get());
  }

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = false;
    try {
      done = inner_->wait(timeout == kNoTimeout ? timeout_ : timeout);
    } catch (const std::exception& error) {
      std::rethrow_exception(failure_->explain(call_, error));
    }
    if (!done) {
      throw PeerError(call_.where + ": " + failure_->stopped());
    }
    return true;
  }

 private:
  FailedCall call_;
  WorkPtr inner_;
  std::shared_ptr<PeerFailure> failure_;
  std::chrono::milliseconds timeout_;
};

class GlooCollectives : public Collectives {
 public:
  GlooCollectives(
      c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo, const GroupSetup& setup)
      : gloo_(std::move(gloo)),
        rank_(setup.rank),
        size_(setup.size()),
        name_(setup.name),
        timeout_(setup.timeout),
        peers_(setup.peers),
        failure_(std::make_shared<PeerFailure>(setup, "gloo")),
        progress_(setup.timeout, failure_) {
    if (peers_) {
      listener_ = peers_->add_listener([this](int64_t world_rank) {
        if (failure_->in_group(world_rank)) {
          stop(failure_->end_of(world_rank));
        }
      });
    }
  }
  ~GlooCollectives() override {
    if (peers_) {
      peers_->remove_listener(listener_);
    }
  }
  GlooCollectives(const GlooCollectives&) = delete;
  GlooCollectives& operator=(const GlooCollectives&) = delete;

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
    return gloo_;
  }
  void abort(const std::string& reason) override {
    if (peers_) {
      peers_->fail(reason);
    }
    stop(reason);
  }
  void leave() override {
    if (peers_) {
      peers_->leave();
    } // and this rank's sockets close
  }

 private:
  std::string where(std::string_view operation, uint64_t seq) const {
    return fmt::format(
        "{} [rank {}/{}, group {}, seq {}]",
        operation,
        rank_,
        size_,
        name_,
        seq);
  }
  int next_tag() {
    return kFirstTag + static_cast<int>(tags_++ % kFirstTag);
  }
  WorkPtr start(CollectiveKind kind, std::vector<GlooWork::Stage> stages) {
    const uint64_t seq = ++seq_;
    failure_->note(kind, seq);
    return progress_.start(c10::make_intrusive<GlooWork>(
        where(name_of(kind), seq), seq, std::move(stages)));
  }
  void stop(const std::string& reason) {
    progress_.abort(reason);
    failure_->stop_messages(reason);
  }
  template <typename Begin>
  WorkPtr message(
      CollectiveKind kind, int64_t peer, int tag, const Begin& begin) {
    failure_->note(kind, seq_);
    const FailedCall call{
        .where = where(name_of(kind), seq_) +
            fmt::format(
                     " {} rank {}, tag {}",
                     kind == CollectiveKind::kSend ? "to" : "from",
                     peer,
                     tag),
        .seq = seq_,
        .suspect = peer,
        .message = true};
    try {
      return c10::make_intrusive<MessageWork>(
          call, begin(), failure_, timeout_);
    } catch (const std::exception& error) {
      std::rethrow_exception(failure_->explain(call, error));
    }
  }

  GlooWork::Stage exchange(Tensors gives, Tensors takes);
  GlooWork::Transfers move(const Tensors& gives, const Tensors& takes, int tag);
  Tensors scratch(const at::Tensor& like, int64_t count) const;
  void reduce(const Tensors& sources, const at::Tensor& out, ReduceOp op) const;
  WorkPtr all_reduce_by_parts(const at::Tensor& tensor, ReduceOp op);
  void check_tag(const char* operation, int tag) const;

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  int64_t rank_;
  int64_t size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> seq_ = 0;
  std::atomic<uint64_t> tags_ = 0;
  std::shared_ptr<PeerWatch> peers_;
  std::shared_ptr<PeerFailure> failure_;
  GlooProgress progress_; // its thread uses the others
  uint64_t listener_ = 0;
};

// Sends gives[r] to every other rank r and receives takes[r] from it.
GlooWork::Transfers GlooCollectives::move(
    const Tensors& gives, const Tensors& takes, int tag) {
  GlooWork::Transfers transfers;
  for (int64_t distance = 1; distance < size_; ++distance) {
    const int64_t from = (rank_ - distance + size_) % size_;
    Tensors one{takes[static_cast<std::size_t>(from)]};
    if (one.front().numel() > 0) {
      transfers.push_back(
          {gloo_->recv(one, static_cast<int>(from), tag), from});
    }
  }
  for (int64_t distance = 1; distance < size_; ++distance) {
    const int64_t to = (rank_ + distance) % size_;
    Tensors one{gives[static_cast<std::size_t>(to)]};
    if (one.front().numel() > 0) {
      transfers.push_back({gloo_->send(one, static_cast<int>(to), tag), to});
    }
  }
  return transfers;
}

// The tag is taken in the call, not when the stage runs: calls come in one
// order on all ranks.
GlooWork::Stage GlooCollectives::exchange(Tensors gives, Tensors takes) {
  return [this,
          gives = std::move(gives),
          takes = std::move(takes),
          tag = next_tag()] { return move(gives, takes, tag); };
}

// One buffer of `count` elements per peer; this rank's own place stays empty.
Tensors GlooCollectives::scratch(const at::Tensor& like, int64_t count) const {
  const at::Tensor all = at::empty({(size_ - 1) * count}, like.options());
  std::vector<int64_t> counts(static_cast<std::size_t>(size_), count);
  counts[static_cast<std::size_t>(rank_)] = 0;
  return slices(all, counts);
}

void GlooCollectives::reduce(
    const Tensors& sources, const at::Tensor& out, ReduceOp op) const {
  if (out.numel() == 0) {
    return;
  }
  std::vector<const std::byte*> data;
  for (const at::Tensor& source : sources) {
    data.push_back(static_cast<const std::byte*>(source.const_data_ptr()));
  }
  reduce_in_order(
      out.scalar_type(),
      op,
      data,
      static_cast<std::byte*>(out.mutable_data_ptr()),
      out.numel());
}

WorkPtr GlooCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const int64_t limit = size_ == 2 ? kWholeBytesOfTwo : kWholeBytes;
  if (static_cast<int64_t>(tensor.nbytes()) > limit) {
    return all_reduce_by_parts(tensor, op);
  }
  Tensors takes = scratch(tensor, tensor.numel());
  const Tensors gives(static_cast<std::size_t>(size_), flat(tensor));
  Tensors sources = takes;
  sources[static_cast<std::size_t>(rank_)] = tensor;
  return start(
      CollectiveKind::kAllReduce,
      {exchange(gives, std::move(takes)),
       [this, sources, tensor, op]() -> GlooWork::Transfers {
         reduce(sources, tensor, op);
         return {};
       }});
}

WorkPtr GlooCollectives::all_reduce_by_parts(
    const at::Tensor& tensor, ReduceOp op) {
  std::vector<int64_t> counts;
  for (int64_t rank = 0; rank < size_; ++rank) {
    counts.push_back(
        tensor.numel() * (rank + 1) / size_ - tensor.numel() * rank / size_);
  }
  const auto own = static_cast<std::size_t>(rank_);
  const Tensors parts = slices(tensor, counts);
  Tensors takes = scratch(tensor, counts[own]);
  Tensors sources = takes;
  sources[own] = parts[own];
  const Tensors reduced(static_cast<std::size_t>(size_), parts[own]);
  const auto spread = exchange(reduced, parts);
  return start(
      CollectiveKind::kAllReduce,
      {exchange(parts, std::move(takes)),
       [this, sources, out = parts[own], op, spread] {
         reduce(sources, out, op);
         return spread();
       }});
}

WorkPtr GlooCollectives::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) {
  const auto own = static_cast<std::size_t>(rank_);
  const Tensors gives = slices(in, counts);
  Tensors takes = scratch(in, counts[own]);
  Tensors sources = takes;
  sources[own] = gives[own];
  return start(
      CollectiveKind::kReduceScatter,
      {exchange(gives, std::move(takes)),
       [this, sources, out, op]() -> GlooWork::Transfers {
         reduce(sources, out, op);
         return {};
       }});
}

WorkPtr GlooCollectives::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) {
  Tensors takes = slices(out, counts);
  copy_own(in, takes[static_cast<std::size_t>(rank_)]);
  const Tensors gives(static_cast<std::size_t>(size_), flat(in));
  return start(CollectiveKind::kAllGather, {exchange(gives, std::move(takes))});
}

WorkPtr GlooCollectives::all_to_all(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> in_counts,
    std::span<const int64_t> out_counts) {
  const auto own = static_cast<std::size_t>(rank_);
  const Tensors gives = slices(in, in_counts);
  Tensors takes = slices(out, out_counts);
  if (gives[own].numel() != takes[own].numel()) {
    throw UsageError(
        where("all_to_all", seq_ + 1) +
        fmt::format(
            ": this rank gives itself {} elements and takes {}; counts must "
            "match",
            gives[own].numel(),
            takes[own].numel()));
  }
  copy_own(gives[own], takes[own]);
  return start(CollectiveKind::kAllToAll, {exchange(gives, std::move(takes))});
}

// Ranks are numbered from the root on. A rank's parent is its number without
// the lowest bit that is set; so its children are its number with one bit set
// below that, and the largest subtree is served first.
WorkPtr GlooCollectives::broadcast(const at::Tensor& tensor, int64_t root) {
  const int64_t number = (rank_ - root + size_) % size_;
  const int64_t lowest = number == 0 ? size_ : number & -number;
  const auto rank_of = [this, root](int64_t n) { return (n + root) % size_; };
  std::vector<int64_t> children;
  for (int64_t bit = 1; bit < lowest && number + bit < size_; bit *= 2) {
    children.insert(children.begin(), rank_of(number + bit));
  }
  const int64_t parent = rank_of(number - (number == 0 ? 0 : lowest));
  const bool empty = tensor.numel() == 0;
  const int tag = next_tag();
  Tensors one{flat(tensor)};
  const auto receive = [=, this]() mutable -> GlooWork::Transfers {
    if (number == 0 || empty) {
      return {};
    }
    return {{gloo_->recv(one, static_cast<int>(parent), tag), parent}};
  };
  const auto send_on = [=, this]() mutable {
    GlooWork::Transfers transfers;
    for (const int64_t child : children) {
      if (!empty) {
        transfers.push_back(
            {gloo_->send(one, static_cast<int>(child), tag), child});
      }
    }
    return transfers;
  };
  return number == 0 ? start(CollectiveKind::kBroadcast, {send_on})
                     : start(CollectiveKind::kBroadcast, {receive, send_on});
}

WorkPtr GlooCollectives::barrier() {
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const Tensors gives(
      static_cast<std::size_t>(size_), at::empty({1}, bytes).zero_());
  return start(
      CollectiveKind::kBarrier, {exchange(gives, scratch(gives.front(), 1))});
}

void GlooCollectives::check_tag(const char* operation, int tag) const {
  if (tag < 0 || tag >= kFirstTag) {
    throw UsageError(
        where(operation, seq_) +
        fmt::format(": tag {}, expected 0 to {}", tag, kFirstTag - 1));
  }
}

WorkPtr GlooCollectives::send(const at::Tensor& tensor, int64_t peer, int tag) {
  check_tag("send", tag);
  Tensors tensors{flat(tensor)};
  return message(CollectiveKind::kSend, peer, tag, [&] {
    return gloo_->send(tensors, static_cast<int>(peer), tag);
  });
}

WorkPtr GlooCollectives::recv(const at::Tensor& tensor, int64_t peer, int tag) {
  check_tag("recv", tag);
  Tensors tensors{flat(tensor)};
  return message(CollectiveKind::kRecv, peer, tag, [&] {
    return gloo_->recv(tensors, static_cast<int>(peer), tag);
  });
}

std::shared_ptr<::gloo::transport::Device> make_device(bool one_host) {
  const auto interface = environment("GLOO_SOCKET_IFNAME");
  if (interface) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(*interface);
  }
  return one_host
      ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
      : c10d::ProcessGroupGloo::createDeviceForHostname(own_address());
}

// Gloo writes to connections that a dead peer has closed, which would end this
// process by SIGPIPE instead of giving an error. A program's own choice stays.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 &&
      current.sa_handler == SIG_DFL) {
    std::signal(SIGPIPE, SIG_IGN);
  }
}

} // namespace

std::unique_ptr<Collectives> make_gloo_collectives(const GroupSetup& setup) {
  ignore_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(setup.timeout);
  options->devices.push_back(make_device(setup.one_host));
  try {
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
        setup.store,
        static_cast<int>(setup.rank),
        static_cast<int>(setup.size()),
        options);
    return std::make_unique<GlooCollectives>(std::move(gloo), setup);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const FailedCall call{
        .where = fmt::format(
            "new_group [rank {}/{}, group {}]",
            setup.rank,
            setup.size(),
            setup.name)};
    std::rethrow_exception(PeerFailure(setup, "gloo").explain(call, error));
  }
}

} // namespace tessera
