// SPDX-License-Identifier: Apache-2.0
// Collectives over a shared window.
//
// The window (shm_window.h) is memory that every rank of a group has mapped. It
// holds, per rank, a header in which the rank announces a call, a word that
// counts the steps at which it has arrived, and buffers: two that others read
// its input from and two that they read its results from. Ranks may be
// processes or threads; nothing below depends on it.
//
// Every collective is a sequence of steps. In a step a rank copies a piece of
// its input into its buffer, meets the others, and then reads what it needs
// from the others' buffers. A meeting is one atomic addition: the last to
// arrive publishes the step's number, on which the others spin for a few
// microseconds and then sleep (futex), so that ranks that outnumber the cores
// do not starve each other.
//
// One meeting per step suffices because buffers alternate by the step's parity.
// Whoever writes buffer p at step k + 2 has met the others at step k + 1, and
// they arrived there only after they had finished reading step k. The same
// holds for headers, which alternate by the call's number, and for results,
// which are written after the meeting of step k and read after that of step k
// + 1. So while a slow rank still reads one piece the others fill the next.
//
// The first meeting of a call also carries the headers. After it, and before
// any output is written, each rank compares all headers with its own:
// operation, call number, dtype, reduction, root, shape or counts. All ranks
// see the same headers, so a mismatch is an error on every rank. Steps need no
// agreement beyond the header: their number follows from what the header holds.
//
// all_reduce of more than a few pages is a reduce-scatter and an all-gather,
// interleaved: in step k a rank reduces its own part of piece k and fetches the
// others' parts of piece k - 1. An element is always combined in the order of
// the ranks, and by one rank or by all alike, so results are equal to the last
// bit on all ranks and in all runs.
//
// A rank that sleeps looks around every 50 ms: has the group failed, has a peer
// that is missing left or died (a pidfd tells even before its parent has
// noticed), is the timeout over? The first to find something wrong publishes it
// in the window, wakes the others and throws; they throw the same. A group that
// has failed stays dead: peers may have stopped anywhere, so no later call
// could be trusted.
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/c10d_adapter.h>
#include <tessera/comm/shm_backend.h>
#include <tessera/comm/shm_c10d.h>
#include <tessera/comm/shm_engine.h>

namespace tessera {
namespace {

class ShmCollectives : public Collectives {
 public:
  ShmCollectives(std::shared_ptr<ShmEngine> engine, int64_t rank, int64_t size)
      : engine_(std::move(engine)), rank_(rank), size_(size) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    engine_->all_reduce(tensor, op);
    return done_work();
  }

  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override {
    engine_->reduce_scatter(in, out, counts, op);
    return done_work();
  }

  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override {
    engine_->all_gather(in, out, counts);
    return done_work();
  }

  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override {
    engine_->all_to_all(in, out, in_counts, out_counts);
    return done_work();
  }

  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override {
    engine_->broadcast(tensor, root);
    return done_work();
  }

  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override {
    return shm_send(engine_, tensor, peer, tag);
  }

  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override {
    return shm_recv(engine_, tensor, peer, tag);
  }

  WorkPtr barrier() override {
    engine_->barrier();
    return done_work();
  }

  at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return shm_tensor(sizes, options);
  }

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return make_c10d_backend(
        "shm",
        std::make_shared<ShmCollectives>(engine_, rank_, size_),
        rank_,
        size_);
  }

  void abort(const std::string& reason) override {
    engine_->abort(reason);
  }

  void leave() override {
    engine_->leave();
  }

 private:
  std::shared_ptr<ShmEngine> engine_;
  int64_t rank_;
  int64_t size_;
};

} // namespace

std::unique_ptr<Collectives> make_shm_collectives(const GroupSetup& setup) {
  auto window =
      ShmWindow::open(setup.store, setup.rank, setup.size(), setup.timeout);
  return std::make_unique<ShmCollectives>(
      std::make_shared<ShmEngine>(std::move(window), setup),
      setup.rank,
      setup.size());
}

} // namespace tessera
