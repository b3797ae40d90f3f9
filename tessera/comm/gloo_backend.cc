// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/gloo_backend.h>
#include <tessera/comm/reduce_kernels.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera {
namespace {

constexpr int kInternalTag = 1
    << 30; // tags of collectives lie above those of users

std::vector<int64_t> starts_of(std::span<const int64_t> counts) {
  std::vector<int64_t> starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  return starts;
}

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

// Several transfers under way, and what remains to be done on this rank once
// they have arrived.
class GlooWork : public c10d::Work {
 public:
  GlooWork(
      std::string where,
      std::vector<WorkPtr> parts,
      std::function<void()> finish,
      std::chrono::milliseconds timeout)
      : where_(std::move(where)),
        parts_(std::move(parts)),
        finish_(std::move(finish)),
        timeout_(timeout) {}

  bool isCompleted() override {
    for (const WorkPtr& part : parts_) {
      if (!part->isCompleted()) {
        return false;
      }
    }
    return true;
  }

  bool isSuccess() const override {
    for (const WorkPtr& part : parts_) {
      if (!part->isSuccess()) {
        return false;
      }
    }
    return true;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
    try {
      for (const WorkPtr& part : parts_) {
        part->wait(limit);
      }
    } catch (const std::exception& error) {
      throw_translated(error.what());
    }
    parts_.clear();
    if (finish_) {
      finish_();
      finish_ = nullptr;
    }
    return true;
  }

 private:
  [[noreturn]] void throw_translated(const std::string& text) const {
    if (text.find("imed out") != std::string::npos) {
      throw TimeoutError(
          where_ + ": a peer did not answer in time (" + text + ")");
    }
    throw PeerError(
        where_ +
        ": a peer went away or called something else; look at its output (" +
        text + ")");
  }

  std::string where_;
  std::vector<WorkPtr> parts_;
  std::function<void()> finish_;
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
        timeout_(setup.timeout) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const std::vector<int64_t> counts(
        static_cast<std::size_t>(size_), tensor.numel());
    const at::Tensor all =
        at::empty({size_ * tensor.numel()}, tensor.options());
    return start(
        "all_reduce",
        repeat(tensor),
        flat(tensor),
        counts,
        slices(all, counts),
        [this, tensor, all, op] { reduce_slices(all, tensor, tensor, op); });
  }

  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override {
    const int64_t own = counts[static_cast<std::size_t>(rank_)];
    const at::Tensor own_in = flat(in).narrow(
        0, starts_of(counts)[static_cast<std::size_t>(rank_)], own);
    const std::vector<int64_t> out_counts(static_cast<std::size_t>(size_), own);
    const at::Tensor all = at::empty({size_ * own}, in.options());
    return start(
        "reduce_scatter",
        slices(flat(in), counts),
        {},
        counts,
        slices(all, out_counts),
        [this, all, own_in, out, op] { reduce_slices(all, own_in, out, op); });
  }

  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override {
    auto parts = slices(flat(out), counts);
    copy_own(in, parts[static_cast<std::size_t>(rank_)]);
    return start(
        "all_gather", repeat(in), {}, counts, std::move(parts), nullptr);
  }

  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override {
    const auto gives = slices(flat(in), in_counts);
    auto takes = slices(flat(out), out_counts);
    const auto own = static_cast<std::size_t>(rank_);
    if (gives[own].numel() != takes[own].numel()) {
      throw UsageError(
          where("all_to_all") +
          ": this rank gives and takes a different number of its own elements");
    }
    copy_own(gives[own], takes[own]);
    return start("all_to_all", gives, {}, in_counts, std::move(takes), nullptr);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override {
    std::vector<at::Tensor> tensors{flat(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout_;
    return wrap("broadcast", {gloo_->broadcast(tensors, options)});
  }

  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override {
    check_tag("send", tag);
    std::vector<at::Tensor> tensors{flat(tensor)};
    return wrap("send", {gloo_->send(tensors, static_cast<int>(peer), tag)});
  }

  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override {
    check_tag("recv", tag);
    std::vector<at::Tensor> tensors{flat(tensor)};
    return wrap("recv", {gloo_->recv(tensors, static_cast<int>(peer), tag)});
  }

  WorkPtr barrier() override {
    c10d::BarrierOptions options;
    options.timeout = timeout_;
    return wrap("barrier", {gloo_->barrier(options)});
  }

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return gloo_;
  }
  void abort(const std::string& /*reason*/) override {
  } // peers notice when this rank's sockets close
  void leave() override {}

 private:
  std::string where(const char* operation) const {
    return fmt::format(
        "{} [rank {}/{}, group {}, seq {}]",
        operation,
        rank_,
        size_,
        name_,
        seq_);
  }

  void check_tag(const char* operation, int tag) const {
    if (tag < 0 || tag >= kInternalTag) {
      throw UsageError(fmt::format(
          "{}: tag {}, expected 0 to {}",
          where(operation),
          tag,
          kInternalTag - 1));
    }
  }

  WorkPtr wrap(const char* operation, std::vector<WorkPtr> parts) {
    ++seq_;
    return c10::make_intrusive<GlooWork>(
        where(operation), std::move(parts), nullptr, timeout_);
  }

  std::vector<at::Tensor> repeat(const at::Tensor& tensor) const {
    return std::vector<at::Tensor>(
        static_cast<std::size_t>(size_), flat(tensor));
  }

  static std::vector<at::Tensor> slices(
      const at::Tensor& tensor, std::span<const int64_t> counts) {
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (const int64_t count : counts) {
      parts.push_back(tensor.narrow(0, begin, count));
      begin += count;
    }
    return parts;
  }

  static void copy_own(const at::Tensor& from, const at::Tensor& to) {
    if (from.numel() > 0 && from.const_data_ptr() != to.const_data_ptr()) {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    }
  }

  // out = the slices of `all` reduced in rank order, with `own` in this rank's
  // place.
  void reduce_slices(
      const at::Tensor& all,
      const at::Tensor& own,
      const at::Tensor& out,
      ReduceOp op) const {
    if (out.numel() == 0) {
      return;
    }
    std::vector<const std::byte*> sources;
    for (int64_t rank = 0; rank < size_; ++rank) {
      const auto* slice = static_cast<const std::byte*>(all.const_data_ptr()) +
          static_cast<std::size_t>(rank) * out.nbytes();
      sources.push_back(
          rank == rank_ ? static_cast<const std::byte*>(own.const_data_ptr())
                        : slice);
    }
    reduce_in_order(
        out.scalar_type(),
        op,
        sources,
        static_cast<std::byte*>(out.mutable_data_ptr()),
        out.numel());
  }

  // Sends gives[r] to every other rank r and receives takes[r] from it;
  // `finish` runs in the wait.
  WorkPtr start(
      const char* operation,
      const std::vector<at::Tensor>& gives,
      const at::Tensor& /*keep*/,
      std::span<const int64_t> /*counts*/,
      const std::vector<at::Tensor>& takes,
      std::function<void()> finish) {
    ++seq_;
    const int tag = kInternalTag | static_cast<int>(seq_ % kInternalTag);
    std::vector<WorkPtr> parts;
    for (int64_t distance = 1; distance < size_; ++distance) {
      const int64_t from = (rank_ - distance + size_) % size_;
      std::vector<at::Tensor> tensors{takes[static_cast<std::size_t>(from)]};
      if (tensors.front().numel() > 0) {
        parts.push_back(gloo_->recv(tensors, static_cast<int>(from), tag));
      }
    }
    for (int64_t distance = 1; distance < size_; ++distance) {
      const int64_t to = (rank_ + distance) % size_;
      std::vector<at::Tensor> tensors{gives[static_cast<std::size_t>(to)]};
      if (tensors.front().numel() > 0) {
        parts.push_back(gloo_->send(tensors, static_cast<int>(to), tag));
      }
    }
    return c10::make_intrusive<GlooWork>(
        where(operation), std::move(parts), std::move(finish), timeout_);
  }

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  int64_t rank_;
  int64_t size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  uint64_t seq_ = 0;
};

std::shared_ptr<::gloo::transport::Device> make_device(bool one_host) {
  const auto interface = environment("GLOO_SOCKET_IFNAME");
  if (interface) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(*interface);
  }
  return one_host ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                  : c10d::ProcessGroupGloo::createDefaultDevice();
}

} // namespace

std::unique_ptr<Collectives> make_gloo_collectives(const GroupSetup& setup) {
  auto options = c10d::ProcessGroupGloo::Options::create(setup.timeout);
  options->devices.push_back(make_device(setup.one_host));
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
      setup.store,
      static_cast<int>(setup.rank),
      static_cast<int>(setup.size()),
      options);
  return std::make_unique<GlooCollectives>(std::move(gloo), setup);
}

} // namespace tessera
