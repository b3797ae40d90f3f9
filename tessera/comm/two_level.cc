// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <tessera/comm/group_impl.h>
#include <tessera/comm/two_level.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;

bool is_narrow_float(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Sums that one rounding, or one division, must end.
bool needs_wide(at::ScalarType dtype, ReduceOp op) {
  return (is_narrow_float(dtype) &&
          (op == ReduceOp::kSum || op == ReduceOp::kAvg ||
           op == ReduceOp::kProduct)) ||
      (op == ReduceOp::kAvg && at::isIntegralType(dtype, false));
}

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(
      is_narrow_float(tensor.scalar_type()) ? at::kFloat : at::kLong);
}

// Divides a sum in place, integers towards zero.
void divide(const at::Tensor& sum, int64_t by) {
  if (at::isIntegralType(sum.scalar_type(), false)) {
    at::Tensor(sum).div_(by, "trunc");
  } else {
    at::Tensor(sum).div_(by);
  }
}

class TwoLevel : public Collectives {
 public:
  TwoLevel(
      int64_t rank,
      HostMap hosts,
      std::unique_ptr<Collectives> flat,
      std::unique_ptr<Collectives> local,
      std::unique_ptr<Collectives> leaders)
      : rank_(rank),
        hosts_(std::move(hosts)),
        order_(hosts_.host_order()),
        flat_(std::move(flat)),
        local_(std::move(local)),
        leaders_(std::move(leaders)) {}

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (needs_wide(tensor.scalar_type(), op)) {
      const at::Tensor wide = widened(tensor);
      reduce_on_all(wide, op);
      at::Tensor(tensor).copy_(wide);
    } else {
      reduce_on_all(tensor, op);
    }
    return done_work();
  }

  WorkPtr reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts,
      ReduceOp op) override;
  WorkPtr all_gather(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> counts) override;

  WorkPtr broadcast(const at::Tensor& tensor, int64_t root) override {
    const int64_t host = hosts_.host_of(root);
    if (host == own_host()) {
      on_host(tensor, position_of(root));
    }
    if (leaders_) {
      leaders_->broadcast(tensor, host)->wait();
    }
    if (host != own_host()) {
      on_host(tensor, 0);
    }
    return done_work();
  }

  WorkPtr barrier() override {
    if (local_) {
      local_->barrier()->wait();
    }
    if (leaders_) {
      leaders_->barrier()->wait();
    }
    if (local_) {
      local_->barrier()->wait();
    }
    return done_work();
  }

  WorkPtr all_to_all(
      const at::Tensor& in,
      const at::Tensor& out,
      std::span<const int64_t> in_counts,
      std::span<const int64_t> out_counts) override {
    return flat_->all_to_all(in, out, in_counts, out_counts);
  }
  WorkPtr send(const at::Tensor& tensor, int64_t peer, int tag) override {
    return flat_->send(tensor, peer, tag);
  }
  WorkPtr recv(const at::Tensor& tensor, int64_t peer, int tag) override {
    return flat_->recv(tensor, peer, tag);
  }

  at::Tensor allocate(
      at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return local_ ? local_->allocate(sizes, options)
                  : at::empty(sizes, options);
  }
  c10::intrusive_ptr<c10d::Backend> backend() override {
    return flat_->backend();
  }
  void abort(const std::string& reason) override {
    each([&](Collectives& level) { level.abort(reason); });
  }
  void leave() override {
    each([](Collectives& level) { level.leave(); });
  }

 private:
  int64_t own_host() const {
    return hosts_.host_of(rank_);
  }
  // Where a rank stands among those of its host.
  int64_t position_of(int64_t rank) const {
    const auto& ranks = hosts_.ranks_of(hosts_.host_of(rank));
    return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  }

  void on_host(const at::Tensor& tensor, int64_t root) {
    if (local_) {
      local_->broadcast(tensor, root)->wait();
    }
  }

  template <typename Call>
  void each(const Call& call) {
    call(*flat_);
    if (local_) {
      call(*local_);
    }
    if (leaders_) {
      call(*leaders_);
    }
  }

  void reduce_on_all(const at::Tensor& tensor, ReduceOp op) {
    const ReduceOp inner = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
    if (local_) {
      local_->all_reduce(tensor, inner)->wait();
    }
    if (leaders_) {
      leaders_->all_reduce(tensor, inner)->wait();
      if (op == ReduceOp::kAvg) {
        divide(tensor, hosts_.size());
      }
    }
    on_host(tensor, 0);
  }

  Counts counts_on_host(std::span<const int64_t> counts) const {
    Counts own;
    for (const int64_t rank : hosts_.ranks_of(own_host())) {
      own.push_back(counts[static_cast<std::size_t>(rank)]);
    }
    return own;
  }
  Counts counts_of_hosts(std::span<const int64_t> counts) const {
    Counts sums(static_cast<std::size_t>(hosts_.host_count()), 0);
    for (int64_t rank = 0; rank < hosts_.size(); ++rank) {
      sums[static_cast<std::size_t>(hosts_.host_of(rank))] +=
          counts[static_cast<std::size_t>(rank)];
    }
    return sums;
  }
  // Between the order of the ranks and that of the hosts.
  void copy_parts(
      const at::Tensor& by_rank,
      const at::Tensor& by_host,
      std::span<const int64_t> counts,
      bool to_hosts) const;
  bool hosts_in_order() const {
    return std::is_sorted(order_.begin(), order_.end());
  }

  int64_t rank_;
  HostMap hosts_;
  Counts order_;
  std::unique_ptr<Collectives> flat_;
  std::unique_ptr<Collectives> local_; // null: alone on this host
  std::unique_ptr<Collectives> leaders_; // null: no leader
};

void TwoLevel::copy_parts(
    const at::Tensor& by_rank,
    const at::Tensor& by_host,
    std::span<const int64_t> counts,
    bool to_hosts) const {
  Counts starts(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  const at::Tensor ranks = by_rank.view(-1);
  int64_t begin = 0;
  for (const int64_t rank : order_) {
    const auto index = static_cast<std::size_t>(rank);
    const at::Tensor here = ranks.narrow(0, starts[index], counts[index]);
    const at::Tensor there = by_host.narrow(0, begin, counts[index]);
    to_hosts ? there.copy_(here) : here.copy_(there);
    begin += counts[index];
  }
}

WorkPtr TwoLevel::reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts,
    ReduceOp op) {
  const bool wide = needs_wide(in.scalar_type(), op);
  const at::Tensor given = wide ? widened(in) : in;
  const at::Tensor sums = allocate({given.numel()}, given.options());
  copy_parts(given, sums, counts, /*to_hosts=*/true);
  const ReduceOp inner = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  const Counts own = counts_on_host(counts);
  const int64_t own_sum = std::accumulate(own.begin(), own.end(), int64_t{0});
  const at::Tensor host_part = allocate({own_sum}, given.options());
  if (local_) {
    local_->all_reduce(sums, inner)->wait();
  }
  if (leaders_) {
    leaders_->reduce_scatter(sums, host_part, counts_of_hosts(counts), inner)
        ->wait();
    if (op == ReduceOp::kAvg) {
      divide(host_part, hosts_.size());
    }
  }
  on_host(host_part, 0);
  const int64_t position = position_of(rank_);
  const int64_t start =
      std::accumulate(own.begin(), own.begin() + position, int64_t{0});
  at::Tensor(out).view(-1).copy_(host_part.narrow(0, start, out.numel()));
  return done_work();
}

WorkPtr TwoLevel::all_gather(
    const at::Tensor& in,
    const at::Tensor& out,
    std::span<const int64_t> counts) {
  const Counts own = counts_on_host(counts);
  const at::Tensor all =
      hosts_in_order() ? out.view(-1) : allocate({out.numel()}, out.options());
  const Counts sums = counts_of_hosts(counts);
  at::Tensor host_part = in;
  if (local_) {
    host_part =
        allocate({sums[static_cast<std::size_t>(own_host())]}, in.options());
    local_->all_gather(in, host_part, own)->wait();
  }
  if (leaders_) {
    leaders_->all_gather(host_part, all, sums)->wait();
  }
  on_host(all, 0);
  if (!hosts_in_order()) {
    copy_parts(out, all, counts, /*to_hosts=*/false);
  }
  return done_work();
}

// The setup of a part of the group.
GroupSetup part_of(
    const GroupSetup& whole, Counts ranks, const std::string& name) {
  GroupSetup part = whole;
  part.rank = std::find(ranks.begin(), ranks.end(), whole.rank) - ranks.begin();
  part.world_ranks.clear();
  for (const int64_t rank : ranks) {
    part.world_ranks.push_back(
        whole.world_ranks[static_cast<std::size_t>(rank)]);
  }
  part.name = whole.name + "/" + name;
  part.id = whole.id + "/" + name;
  part.store = c10::make_intrusive<c10d::PrefixStore>(name, whole.store);
  return part;
}

} // namespace

HostMap::HostMap(const std::vector<int64_t>& hosts) {
  std::vector<int64_t> seen;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    auto found = std::find(seen.begin(), seen.end(), hosts[rank]);
    if (found == seen.end()) {
      found = seen.insert(seen.end(), hosts[rank]);
      ranks_.emplace_back();
    }
    host_of_.push_back(found - seen.begin());
    ranks_[static_cast<std::size_t>(host_of_.back())].push_back(
        static_cast<int64_t>(rank));
  }
}

std::vector<int64_t> HostMap::host_order() const {
  std::vector<int64_t> order;
  for (const auto& ranks : ranks_) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  return order;
}

std::unique_ptr<Collectives> make_two_level_collectives(
    const GroupSetup& setup,
    const HostMap& hosts,
    const MakeGroup& make_local,
    const MakeGroup& make_remote) {
  auto flat = make_remote(setup);
  const int64_t host = hosts.host_of(setup.rank);
  std::unique_ptr<Collectives> local;
  if (hosts.ranks_of(host).size() > 1) {
    GroupSetup part =
        part_of(setup, hosts.ranks_of(host), "host" + std::to_string(host));
    part.one_host = true;
    local = make_local(part);
  }
  std::unique_ptr<Collectives> leaders;
  if (hosts.leader_of(setup.rank) == setup.rank) {
    Counts ranks;
    for (int64_t each = 0; each < hosts.host_count(); ++each) {
      ranks.push_back(hosts.ranks_of(each).front());
    }
    leaders = make_remote(part_of(setup, ranks, "leaders"));
  }
  return std::make_unique<TwoLevel>(
      setup.rank, hosts, std::move(flat), std::move(local), std::move(leaders));
}

} // namespace tessera
