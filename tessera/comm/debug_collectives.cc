// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/call_header.h>
#include <tessera/comm/debug_collectives.h>
#include <tessera/comm/debug_messages_impl.h>
#include <tessera/comm/rank_text.h>
#include <tessera/comm/rendezvous.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

namespace tessera {
namespace {

// What the ranks sent: a card each, and 2 * size counts.
class Cards {
 public:
  Cards(const at::Tensor& bytes, int64_t size) : size_(size) {
    const auto* data = static_cast<const std::byte*>(bytes.const_data_ptr());
    const auto each = static_cast<std::size_t>(bytes.numel() / size);
    const auto n = static_cast<std::size_t>(2 * size);
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(size); ++rank) {
      cards_.push_back(read_card(data + rank * each));
      std::vector<int64_t> counts(n);
      std::memcpy(
          counts.data(),
          data + rank * each + sizeof(CallCard),
          n * sizeof(int64_t));
      counts_.push_back(std::move(counts));
    }
  }

  const CallCard& card(int64_t rank) const {
    return cards_[static_cast<std::size_t>(rank)];
  }
  Announcement announcement(int64_t rank) const {
    return {card(rank).header, {counts(rank), half()}, {takes(rank), half()}};
  }
  const int64_t* counts(int64_t rank) const {
    return counts_[static_cast<std::size_t>(rank)].data();
  }
  const int64_t* takes(int64_t rank) const {
    return counts(rank) + size_;
  }

 private:
  std::size_t half() const {
    return static_cast<std::size_t>(size_);
  }

  int64_t size_;
  std::vector<CallCard> cards_;
  std::vector<std::vector<int64_t>> counts_;
};

class DebugCollectives : public Collectives {
 public:
  DebugCollectives(std::unique_ptr<Collectives> inner, const GroupSetup& setup)
      : inner_(std::move(inner)),
        rank_(setup.rank),
        world_ranks_(setup.world_ranks),
        name_(setup.name),
        host_(host_name()),
        on_cpu_(setup.host),
        messages_(setup, on_cpu_ ? *on_cpu_ : *inner_) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    compare(
        {.kind = CollectiveKind::kAllReduce,
         .dtype = tensor.scalar_type(),
         .op = op,
         .shape = tensor.sizes()});
    return inner_->all_reduce(tensor, op);
  }

  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override {
    compare(
        {.kind = CollectiveKind::kReduceScatter,
         .dtype = in.scalar_type(),
         .op = op,
         .counts = counts});
    return inner_->reduce_scatter(in, out, counts, op);
  }

  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override {
    compare(
        {.kind = CollectiveKind::kAllGather,
         .dtype = in.scalar_type(),
         .counts = counts});
    return inner_->all_gather(in, out, counts);
  }

  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override {
    compare(
        {.kind = CollectiveKind::kAllToAll,
         .dtype = in.scalar_type(),
         .counts = in_counts,
         .out_counts = out_counts});
    return inner_->all_to_all(in, out, in_counts, out_counts);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override {
    compare(
        {.kind = CollectiveKind::kBroadcast,
         .dtype = tensor.scalar_type(),
         .root = root,
         .shape = tensor.sizes()});
    return inner_->broadcast(tensor, root);
  }

  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override {
    return messages_.start(CollectiveKind::kSend, tensor, peer, tag);
  }
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override {
    return messages_.start(CollectiveKind::kRecv, tensor, peer, tag);
  }

  WorkPtr barrier() override {
    compare({.kind = CollectiveKind::kBarrier, .shape = at::IntArrayRef{}});
    return inner_->barrier();
  }

  bool can_lend(std::span<const at::Tensor> tensors) override {
    return inner_->can_lend(tensors);
  }

  WorkPtr with_peers(
      std::span<const at::Tensor> lent,
      std::function<void(PeerBuffers)> body) override {
    std::vector<int64_t> bytes;
    for (const at::Tensor& tensor : lent) {
      bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    }
    compare({.kind = CollectiveKind::kWithPeers, .shape = bytes});
    return inner_->with_peers(lent, std::move(body));
  }

  at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return inner_->allocate(sizes, options);
  }

  c10::intrusive_ptr<c10d::Backend> backend() override {
    return inner_->backend();
  }
  void abort(const std::string& reason) override {
    messages_.die(reason);
    inner_->abort(reason);
  }
  void leave() override {
    inner_->leave();
  }

 private:
  int64_t size() const {
    return static_cast<int64_t>(world_ranks_.size());
  }
  std::string where(CollectiveKind kind) const {
    return fmt::format(
        "{} [rank {}/{}, group {}, seq {}]",
        name_of(kind),
        rank_,
        size(),
        name_,
        seq_);
  }
  std::string who(const Cards& cards, int64_t rank) const {
    const CallCard& card = cards.card(rank);
    return rank_text(
        rank,
        world_ranks_[static_cast<std::size_t>(rank)],
        card.pid,
        card.host.data());
  }

  void compare(const CallDescription& call);
  at::Tensor own_card(const CallDescription& call) const;
  void compare_headers(const Cards& cards);
  void compare_pairs(const Cards& cards);
  [[noreturn]] void fail(CollectiveKind kind, const std::string& text);

  std::unique_ptr<Collectives> inner_;
  int64_t rank_;
  std::vector<int64_t> world_ranks_;
  std::string name_;
  std::string host_;
  std::shared_ptr<Collectives> on_cpu_; // null: inner_
  std::mutex mutex_; // of all below
  uint64_t seq_ = 0; // of the collectives
  DebugMessages messages_; // also keeps why the group is dead
};

at::Tensor DebugCollectives::own_card(const CallDescription& call) const {
  const CallCard card = card_of(call, seq_, host_);
  const auto counts_bytes = 2 * size() * int64_t{sizeof(int64_t)};
  at::Tensor bytes =
      at::empty({int64_t{sizeof(CallCard)} + counts_bytes}, at::kByte);
  auto* data = static_cast<std::byte*>(bytes.mutable_data_ptr());
  std::memset(data, 0, bytes.nbytes());
  std::memcpy(data, &card, sizeof(CallCard));
  std::byte* counts = data + sizeof(CallCard);
  if (!call.counts.empty()) {
    std::memcpy(counts, call.counts.data(), call.counts.size_bytes());
  }
  if (!call.out_counts.empty()) {
    std::memcpy(
        counts + counts_bytes / 2,
        call.out_counts.data(),
        call.out_counts.size_bytes());
  }
  return bytes;
}

void DebugCollectives::compare(const CallDescription& call) {
  const std::scoped_lock lock(mutex_);
  const std::string dead = messages_.dead();
  if (!dead.empty()) {
    throw PeerError(
        where(call.kind) + ": the group is dead; first error: " + dead);
  }
  ++seq_;
  const at::Tensor own = own_card(call);
  const at::Tensor all = at::empty({size() * own.numel()}, at::kByte);
  const std::vector<int64_t> each(
      static_cast<std::size_t>(size()), own.numel());
  const auto context = [&](const Error& error) {
    std::string text = where(call.kind) + ", comparing calls: " + error.what();
    messages_.die(text);
    return text;
  };
  try {
    Collectives& exchange = on_cpu_ ? *on_cpu_ : *inner_;
    exchange.all_gather(own, all, each)->wait();
  } catch (const TimeoutError& error) {
    throw TimeoutError(context(error));
  } catch (const PeerError& error) {
    throw PeerError(context(error));
  }
  const Cards cards(all, size());
  compare_headers(cards);
  if (call.kind == CollectiveKind::kAllToAll) {
    compare_pairs(cards);
  }
}

void DebugCollectives::compare_headers(const Cards& cards) {
  const Announcement mine = cards.announcement(rank_);
  const CollectiveKind kind = mine.header.kind;
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (!is_sound(cards.card(peer).header)) {
      fail(kind, fmt::format("rank {} sent bytes that describe no call", peer));
    }
    const Announcement theirs = cards.announcement(peer);
    const char* mismatch = find_mismatch(mine, theirs);
    if (mismatch != nullptr) {
      fail(
          kind,
          fmt::format(
              "{} here, {} on {} (its seq {}); {} must match",
              describe(mine),
              describe(theirs),
              who(cards, peer),
              theirs.header.seq,
              mismatch));
    }
  }
}

void DebugCollectives::compare_pairs(const Cards& cards) {
  for (int64_t from = 0; from < size(); ++from) {
    for (int64_t to = 0; to < size(); ++to) {
      const int64_t gives = cards.counts(from)[to];
      const int64_t takes = cards.takes(to)[from];
      if (gives != takes) {
        fail(
            CollectiveKind::kAllToAll,
            fmt::format(
                "{} gives {} elements to {}, which takes {}; counts must match",
                who(cards, from),
                gives,
                who(cards, to),
                takes));
      }
    }
  }
}

void DebugCollectives::fail(CollectiveKind kind, const std::string& text) {
  const std::string whole = where(kind) + ": " + text;
  messages_.die(whole);
  throw PeerError(whole);
}

} // namespace

std::unique_ptr<Collectives> make_debug_collectives(
    std::unique_ptr<Collectives> inner, const GroupSetup& setup) {
  return std::make_unique<DebugCollectives>(std::move(inner), setup);
}

} // namespace tessera
