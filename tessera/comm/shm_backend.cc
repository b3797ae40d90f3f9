// SPDX-License-Identifier: Apache-2.0
// Collectives over memory that ranks share.
//
// The window (shm_window.h) is memory that every rank of a group has mapped. It
// holds, per rank, a header in which the rank announces a call, the last step
// at which it has arrived, and buffers: two that others read its input from and
// two that they read its results from. Ranks may be processes or threads.
//
// Every collective is a sequence of steps between meetings. A meeting is one
// store per rank, of the step's number, and a look at the others' numbers. A
// rank spins for some microseconds where every rank has a core of its own, then
// yields the core some times, and at last sleeps (futex) until a peer that
// arrives wakes it: ranks that outnumber the cores do not starve each other.
//
// Data moves in one of two ways, and each rank chooses for itself. A rank
// *lends* what it gives when the others can reach it in place: always among
// threads of one process, and among processes when the tensor lies in the arena
// (shm_arena.h), whose segments peers map at their first use. Else it *stages*:
// it copies its share, a piece per step, into its buffer of the window. The
// first meeting carries every rank's choice. If all lend, the call is one pass
// over the peers' memory, and a second meeting tells that nobody reads any
// more. If some stage, the call goes piece by piece for all, each source being
// read where it is. Small calls always stage: one meeting is all they need.
//
// One meeting per step suffices for staged data because buffers alternate by
// the step's parity. Whoever writes buffer p at step k + 2 has met the others
// at step k + 1, and they arrived there only after they had finished reading
// step k. The same holds for headers, which alternate by the call's number, and
// for results, which are written after the meeting of step k and read after
// that of step k + 1. So while a slow rank still reads one piece the others
// fill the next.
//
// The first meeting of a call also checks it: each rank compares one number per
// peer, made from operation, call number, dtype, reduction, root, shape or
// counts, before any output is written, and the headers themselves where the
// numbers differ. All ranks see the same, so a mismatch is an error on every
// rank. Steps need no agreement beyond that: their number follows from what the
// headers and the choices hold.
//
// all_reduce of more than a few pages splits the tensor among the ranks. A rank
// reduces its part from all sources and writes it to every lent tensor, its own
// among them; for those who stage it leaves the part in its result buffer, from
// which they fetch it one step later. An element is always combined in the
// order of the ranks, and by one rank or by all alike, so results are equal to
// the last bit on all ranks and in all runs.
//
// with_peers lends in the same way, and leaves what happens between the two
// meetings to its caller: the second one tells that all functions have ended.
//
// A rank that sleeps looks around every 50 ms: has the group failed, has a peer
// that is missing left or died (a pidfd tells even before its parent has
// noticed), is the timeout over? The first to find something wrong publishes it
// in the window, wakes the others and throws; they throw the same. Before a
// rank throws it waits until nobody is in the middle of using what it lent, so
// that its caller may free it; if a stopped process is, the engine keeps the
// tensor. A group that has failed stays dead: peers may have stopped anywhere,
// so no later call could be trusted.
//
// Nothing a peer writes is used as an address or a size before it was checked
// against the memory that the peer owns.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/c10d_adapter.h>
#include <tessera/comm/progress_thread.h>
#include <tessera/comm/shm_arena.h>
#include <tessera/comm/shm_backend.h>
#include <tessera/comm/shm_c10d.h>
#include <tessera/comm/shm_engine.h>

#include <mutex>
#include <vector>

namespace tessera {
namespace {

// What both sides of a group share.
struct Channel {
  Channel(std::shared_ptr<ShmWindow> window, const GroupSetup& setup)
      : engine(std::make_shared<ShmEngine>(std::move(window), setup)),
        progress(setup.rank, setup.size()) {}

  std::shared_ptr<ShmEngine> engine;
  ProgressThread progress;
};

std::vector<int64_t> copied(std::span<const int64_t> counts) {
  return {counts.begin(), counts.end()};
}

// The calls of a group: at once, or in the background, on the channel's thread.
class ShmCollectives : public Collectives {
 public:
  ShmCollectives(
      std::shared_ptr<Channel> channel,
      int64_t rank,
      int64_t size,
      bool in_background = false)
      : channel_(std::move(channel)),
        engine_(*channel_->engine),
        rank_(rank),
        size_(size),
        in_background_(in_background) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (in_background_) {
      return submit(
          [tensor, op](ShmEngine& engine) { engine.all_reduce(tensor, op); },
          tensor);
    }
    return now([&] { engine_.all_reduce(tensor, op); });
  }

  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override {
    if (in_background_) {
      return submit(
          [in, out, op, own = copied(counts)](ShmEngine& engine) {
            engine.reduce_scatter(in, out, own, op);
          },
          out);
    }
    return now([&] { engine_.reduce_scatter(in, out, counts, op); });
  }

  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override {
    if (in_background_) {
      return submit(
          [in, out, own = copied(counts)](ShmEngine& engine) {
            engine.all_gather(in, out, own);
          },
          out);
    }
    return now([&] { engine_.all_gather(in, out, counts); });
  }

  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override {
    if (in_background_) {
      return submit(
          [in, out, gives = copied(in_counts), takes = copied(out_counts)](
              ShmEngine& engine) { engine.all_to_all(in, out, gives, takes); },
          out);
    }
    return now([&] { engine_.all_to_all(in, out, in_counts, out_counts); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override {
    if (in_background_) {
      return submit(
          [tensor, root](ShmEngine& engine) { engine.broadcast(tensor, root); },
          tensor);
    }
    return now([&] { engine_.broadcast(tensor, root); });
  }

  // Messages move beside collectives by themselves.
  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override {
    return shm_send(channel_->engine, tensor, peer, tag);
  }
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override {
    return shm_recv(channel_->engine, tensor, peer, tag);
  }

  WorkPtr barrier() override {
    if (in_background_) {
      return submit([](ShmEngine& engine) { engine.barrier(); }, {});
    }
    return now([&] { engine_.barrier(); });
  }

  bool can_lend(std::span<const at::Tensor> tensors) override {
    return engine_.can_lend(tensors);
  }

  WorkPtr with_peers(
      std::span<const at::Tensor> lent,
      std::function<void(PeerBuffers)> body) override {
    if (in_background_) {
      const std::vector<at::Tensor> own(lent.begin(), lent.end());
      return submit(
          [own, body = std::move(body)](ShmEngine& engine) {
            engine.with_peers(own, body);
          },
          {});
    }
    return now([&] { engine_.with_peers(lent, body); });
  }

  at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return shm_tensor(sizes, options);
  }
  c10::Allocator* allocator() override {
    return &ShmArena::instance();
  }

  Collectives& background() override {
    if (in_background_) {
      return *this;
    }
    const std::scoped_lock lock(mutex_);
    if (!background_) {
      background_ = std::make_unique<ShmCollectives>(
          channel_, rank_, size_, /*in_background=*/true);
    }
    return *background_;
  }

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return make_c10d_backend(
        "shm",
        std::make_shared<ShmCollectives>(
            channel_, rank_, size_, in_background_),
        rank_,
        size_);
  }

  void abort(const std::string& reason) override {
    engine_.abort(reason);
  }
  void leave() override {
    engine_.leave();
  }

 private:
  // After what the background has still to do, so that ranks agree on the
  // order.
  template <typename Call>
  WorkPtr now(const Call& call) {
    channel_->progress.drain();
    call();
    return done_work();
  }

  template <typename Call>
  WorkPtr submit(Call call, const at::Tensor& result) {
    return channel_->progress.submit(
        [engine = channel_->engine, call = std::move(call)] { call(*engine); },
        result.defined() ? std::vector<at::Tensor>{result}
                         : std::vector<at::Tensor>{});
  }

  std::shared_ptr<Channel> channel_;
  ShmEngine& engine_;
  int64_t rank_;
  int64_t size_;
  bool in_background_;
  std::mutex mutex_;
  std::unique_ptr<ShmCollectives> background_; // made at its first use
};

} // namespace

std::unique_ptr<Collectives> make_shm_collectives(const GroupSetup& setup) {
  auto window =
      ShmWindow::open(setup.store, setup.rank, setup.size(), setup.timeout);
  return std::make_unique<ShmCollectives>(
      std::make_shared<Channel>(std::move(window), setup),
      setup.rank,
      setup.size());
}

} // namespace tessera
