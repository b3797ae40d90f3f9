// SPDX-License-Identifier: Apache-2.0
// Operators whose backward, or they themselves, libtorch composes of others: on
// distributed tensors they do what they do on plain ones.
#include <gtest/gtest.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::seeded_positive;

using at::Tensor;
namespace F = torch::nn::functional; // NOLINT(readability-identifier-naming)

struct Composite {
  const char* name;
  std::vector<int64_t> sizes;
  Tensor (*call)(const Tensor&);
};

// Positions below an extent, some of them twice.
Tensor places(int64_t count, int64_t extent) {
  return (torch::arange(count) * 2).remainder(extent);
}

std::vector<Composite> selections() {
  return {
      {"trace", {5, 4}, [](const Tensor& x) -> Tensor { return x.trace(); }},
      {"cummax",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.cummax(0)); }},
      {"cummin",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.cummin(1)); }},
      {"unbind",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.unbind(0)[1] * x.unbind(0)[2];
       }},
      {"max",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.max(0)); }},
      {"topk",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.topk(2, 0)); }},
      {"sort",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.sort(0)); }},
      {"kthvalue",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.kthvalue(2, 0)); }},
      {"median",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.median(0)); }},
      {"median all",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.median(); }},
      {"mode",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.mode(0)); }},
      {"aminmax",
       {5, 4},
       [](const Tensor& x) -> Tensor { return std::get<0>(x.aminmax(0)); }},
      {"amax", {5, 4}, [](const Tensor& x) -> Tensor { return x.amax(0); }},
      {"take",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.take(places(6, 20)); }},
      {"gather",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.gather(0, places(8, 5).view({2, 4}));
       }},
      {"index_select",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.index_select(0, places(3, 5));
       }},
      {"index",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.index({places(3, 5)}); }},
      {"index_put",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.index_put({places(3, 5)}, x.select(0, 0));
       }},
  };
}

std::vector<Composite> more_selections() {
  return {
      {"index_fill",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.index_fill(0, places(3, 5), 2);
       }},
      {"index_add",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.index_add(0, places(5, 5), x);
       }},
      {"index_copy",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.index_copy(0, places(2, 5), x.slice(0, 0, 2));
       }},
      {"scatter",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.scatter(0, places(8, 5).view({2, 4}), x.slice(0, 0, 2));
       }},
      {"scatter_add",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.scatter_add(0, places(8, 5).view({2, 4}), x.slice(0, 0, 2));
       }},
      {"scatter_reduce",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.scatter_reduce(
             0, places(8, 5).view({2, 4}), x.slice(0, 0, 2), "amax");
       }},
      {"masked_scatter",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.masked_scatter(x > 1, x.flip(0));
       }},
      {"masked_select",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.masked_select(x > 1); }},
      {"put",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.put(places(4, 20), x.select(0, 0));
       }},
      {"embedding_bag",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return std::get<0>(
             torch::embedding_bag(x, places(6, 5), torch::arange(2) * 3));
       }},
  };
}

std::vector<Composite> rearrangements() {
  return {
      {"diagonal",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.diagonal(); }},
      {"diag", {5, 4}, [](const Tensor& x) -> Tensor { return x.diag(); }},
      {"diag_embed",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.diag_embed(); }},
      {"repeat",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.repeat({2, 1});
       }},
      {"unfold",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.unfold(0, 2, 1); }},
      {"cumprod zeros",
       {5, 4},
       [](const Tensor& x) -> Tensor { return (x * (x > 1)).cumprod(0); }},
      {"logcumsumexp",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.logcumsumexp(0); }},
      {"prod zeros",
       {5, 4},
       [](const Tensor& x) -> Tensor { return (x * (x > 1)).prod(); }},
      {"prod dim zeros",
       {5, 4},
       [](const Tensor& x) -> Tensor { return (x * (x > 1)).prod(0); }},
      {"renorm",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.renorm(2, 0, 1); }},
      {"pad circular",
       {2, 3, 4},
       [](const Tensor& x) -> Tensor {
         return F::pad(x, F::PadFuncOptions({1, 1}).mode(torch::kCircular));
       }},
      {"block_diag",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return torch::block_diag({x, x});
       }},
  };
}

std::vector<Composite> more_rearrangements() {
  return {
      {"matrix_exp",
       {3, 3},
       [](const Tensor& x) -> Tensor { return torch::matrix_exp(x * 0.1); }},
      {"select_scatter",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.select_scatter(x.select(0, 1), 0, 2);
       }},
      {"slice_scatter",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return x.slice_scatter(x.slice(0, 0, 2), 0, 2, 4);
       }},
      {"corrcoef",
       {5, 4},
       [](const Tensor& x) -> Tensor { return x.corrcoef(); }},
      {"pad_sequence",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return torch::pad_sequence({x, x.slice(0, 0, 2)});
       }},
      {"one_hot",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return torch::one_hot((x * 2).to(torch::kLong), 4).to(torch::kFloat) *
             x.unsqueeze(-1);
       }},
      {"pad_sequence left",
       {5, 4},
       [](const Tensor& x) -> Tensor {
         return torch::pad_sequence({x, x.slice(0, 0, 2)}, true, 0.5, "left");
       }},
  };
}

struct Evaluated {
  Tensor value;
  Tensor gradient;
};

Evaluated evaluate(const Composite& op, const Tensor& x) {
  const Tensor y = op.call(x);
  const Tensor weights = torch::linspace(0.5, 1.5, y.numel()).view(y.sizes());
  (y * weights).sum().backward();
  const Tensor value = y.detach();
  return {
      is_dtensor(value) ? full_tensor(value) : value,
      is_dtensor(x.grad()) ? full_tensor(x.grad()) : x.grad()};
}

void check(const Composite& op, int64_t ranks) {
  const Tensor value = seeded_positive(op.sizes);
  const Evaluated expected = evaluate(op, value.clone().requires_grad_());
  run_ranks(ranks, [&](World world) {
    const DeviceMesh mesh = line(world);
    for (const Placement& placement :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Partial())}) {
      SCOPED_TRACE(std::string(op.name) + " " + placement.str());
      const Evaluated got =
          evaluate(op, distribute(value, mesh, {placement}).requires_grad_());
      EXPECT_TRUE(torch::allclose(got.value, expected.value, 1e-4, 1e-5))
          << got.value << "\nexpected\n"
          << expected.value;
      EXPECT_TRUE(torch::allclose(got.gradient, expected.gradient, 1e-4, 1e-5))
          << got.gradient << "\nexpected\n"
          << expected.gradient;
    }
  });
}

void check_all(const std::vector<Composite>& all, int64_t ranks) {
  for (const Composite& op : all) {
    check(op, ranks);
  }
}

class CompositesOn : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CompositesOn, testing::Values(1, 2, 3, 4));

TEST_P(CompositesOn, ThatSelectEqualThePlainOnes) {
  check_all(selections(), GetParam());
  check_all(more_selections(), GetParam());
}

TEST_P(CompositesOn, ThatRearrangeEqualThePlainOnes) {
  check_all(rearrangements(), GetParam());
  check_all(more_rearrangements(), GetParam());
}

TEST(Composites, OneHotRefusesValuesBeyondTheClasses) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh = line(world);
    const Tensor x = distribute(torch::arange(5), mesh, {Shard(0)});
    EXPECT_EQ(torch::one_hot(x).size(1), 5);
    EXPECT_THROW(torch::one_hot(x, 4), UsageError);
    EXPECT_THROW(torch::one_hot(x - 1, 5), UsageError);
  });
}

} // namespace
} // namespace tessera
