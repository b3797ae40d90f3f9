// SPDX-License-Identifier: Apache-2.0
//
// Every family's operators on all ranks of imagined meshes, under placements
// drawn at random: whatever is decided, what the ranks make up together is what
// the plain call gives.
#include <gtest/gtest.h>
#include <tessera/sharding/simulation.h>

#include <cmath>
#include <random>

namespace tessera::simulation {
namespace {

using c10::IValue;
using Ints = std::vector<int64_t>;

at::Tensor floats(Ints sizes) {
  return torch::randn(sizes, torch::kDouble);
}

at::Tensor positive(Ints sizes) {
  return torch::rand(sizes, torch::kDouble) + 0.1;
}

at::Tensor flags(Ints sizes) {
  return torch::rand(sizes) > 0.5;
}

at::Tensor indices(Ints sizes, int64_t below) {
  return torch::randint(0, below, sizes, torch::kLong);
}

c10::List<at::Tensor> list(std::vector<at::Tensor> tensors) {
  return c10::List<at::Tensor>(tensors);
}

// Placements that a tensor of the call may have; sums mostly, for the other
// reductions are rare.
Placement draw(const at::Tensor& tensor, std::mt19937& random) {
  const auto pick = [&](int64_t below) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(below));
  };
  const int64_t roll = pick(10);
  if (roll < 4 && tensor.dim() > 0) {
    return Shard(pick(tensor.dim()), pick(4) == 0 ? 2 : 1);
  }
  if (roll < 7 || tensor.scalar_type() == torch::kBool) {
    return Replicate();
  }
  if (roll == 9 && tensor.is_floating_point()) {
    static constexpr ReduceOp kOps[] = {
        ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};
    return Partial(kOps[pick(3)]);
  }
  return Partial();
}

std::vector<Placements> draw(
    const PlainCall& call, size_t axes, std::mt19937& random) {
  std::vector<Placements> all;
  const auto add = [&](const at::Tensor& tensor) {
    Placements placements;
    for (size_t axis = 0; axis < axes; ++axis) {
      placements.push_back(
          tensor.defined() ? draw(tensor, random) : Placement());
    }
    all.push_back(placements);
  };
  for (const IValue& value : call.args) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor);
      }
    } else if (value.isNone()) {
      continue;
    }
  }
  return all;
}

// Absent optional tensors take a place among the placements too; they are
// passed as undefined tensors.
const at::Tensor kAbsent;

void run(const PlainCall& call) {
  static const std::vector<std::vector<Axis>> kMeshes{
      {{"dp", 1}},
      {{"dp", 2}},
      {{"dp", 3}},
      {{"dp", 4}},
      {{"dp", 2}, {"tp", 2}}};
  std::mt19937 random(7);
  for (const auto& axes : kMeshes) {
    for (int round = 0; round < 8; ++round) {
      auto placements = draw(call, axes.size(), random);
      placements.resize(
          std::max(placements.size(), tensor_count(call)),
          Placements(axes.size()));
      std::string given;
      for (const Placements& one : placements) {
        given += str(one) + " ";
      }
      SCOPED_TRACE(
          call.op + " given " + given + "on " + std::to_string(axes.size()) +
          " axes, first " + std::to_string(axes[0].size));
      try {
        check(call, axes, placements);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      if (testing::Test::HasFailure()) {
        return; // one is enough to look at
      }
    }
  }
}

void run_all(const std::vector<PlainCall>& calls) {
  for (const PlainCall& call : calls) {
    run(call);
  }
}

TEST(Simulation, PointwiseOperatorsEqualPlainOnes) {
  torch::manual_seed(1);
  for (const char* op :
       {"abs",
        "relu",
        "neg",
        "exp",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "silu",
        "erf",
        "sign",
        "isnan",
        "logical_not",
        "isfinite"}) {
    run({std::string("aten::") + op, {floats({5, 6})}});
  }
  for (const char* op : {"rsqrt", "sqrt", "log", "reciprocal"}) {
    run({std::string("aten::") + op, {positive({5, 6})}});
  }
  for (const char* op :
       {"add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "maximum",
        "lt.Tensor",
        "eq.Tensor",
        "atan2",
        "rsub.Tensor"}) {
    run({std::string("aten::") + op, {floats({5, 6}), floats({5, 6})}});
    run({std::string("aten::") + op, {floats({2, 5, 6}), floats({6})}});
    run({std::string("aten::") + op, {floats({5, 1}), floats({1, 6})}});
    run({std::string("aten::") + op, {floats({5, 6}).t(), floats({6, 5})}});
  }
  run_all({
      {"aten::div.Tensor", {floats({5, 6}), positive({6})}},
      {"aten::div.Scalar", {floats({5, 6}), 3.0}},
      {"aten::add.Scalar", {floats({5, 6}), 3.0, 1}},
      {"aten::mul.Scalar", {floats({}), 3.0}},
      {"aten::pow.Tensor_Scalar", {floats({5, 6}), 2}},
      {"aten::gelu", {floats({5, 6}), "none"}},
      {"aten::clamp", {floats({5, 6}), -0.5, 0.5}},
      {"aten::clamp.Tensor", {floats({5, 6}), floats({6}), kAbsent}},
      {"aten::where.self", {flags({5, 6}), floats({6}), floats({5, 6})}},
      {"aten::masked_fill.Scalar", {floats({5, 6}), flags({6}), 0.0}},
      {"aten::masked_fill.Scalar", {floats({5, 6}), flags({6}), 1.0}},
      {"aten::masked_fill.Tensor", {floats({5, 6}), flags({5, 6}), floats({})}},
      {"aten::addcmul", {floats({5, 6}), floats({6}), floats({5, 1}), 2.0}},
      {"aten::addcdiv", {floats({5, 6}), floats({6}), positive({5, 6}), 2.0}},
      {"aten::lerp.Scalar", {floats({5, 6}), floats({5, 6}), 0.3}},
      {"aten::lerp.Tensor", {floats({5, 6}), floats({6}), floats({5, 6})}},
      {"aten::gelu_backward", {floats({5, 6}), floats({5, 6}), "none"}},
      {"aten::silu_backward", {floats({5, 6}), floats({5, 6})}},
      {"aten::threshold_backward", {floats({5, 6}), floats({5, 6}), 0.0}},
      {"aten::native_dropout_backward", {floats({5, 6}), flags({5, 6}), 2.0}},
      {"aten::clone", {floats({5, 6}), IValue()}},
      {"aten::clone", {floats({6, 5}).t(), IValue()}},
      {"aten::clone",
       {floats({6, 5}).t(),
        static_cast<int64_t>(c10::MemoryFormat::Contiguous)}},
      {"aten::_to_copy",
       {floats({6, 5}).t(), static_cast<int64_t>(torch::kFloat)}},
      {"aten::_to_copy",
       {indices({6, 5}, 9), static_cast<int64_t>(torch::kDouble)}},
  });
}

TEST(Simulation, InPlaceOperatorsEqualPlainOnes) {
  torch::manual_seed(2);
  run_all({
      {"aten::add_.Tensor", {floats({5, 6}), floats({5, 6})}},
      {"aten::add_.Tensor", {floats({5, 6}), floats({6})}},
      {"aten::add_.Scalar", {floats({5, 6}), 1.0}},
      {"aten::mul_.Tensor", {floats({5, 6}), floats({5, 6})}},
      {"aten::mul_.Scalar", {floats({5, 6}), 2.0}},
      {"aten::div_.Tensor", {floats({5, 6}), positive({5, 1})}},
      {"aten::addcmul_", {floats({5, 6}), floats({5, 6}), floats({5, 6}), 2.0}},
      {"aten::addcdiv_",
       {floats({5, 6}), floats({5, 6}), positive({5, 6}), 2.0}},
      {"aten::lerp_.Scalar", {floats({5, 6}), floats({5, 6}), 0.3}},
      {"aten::clamp_", {floats({5, 6}), -0.5, 0.5}},
      {"aten::relu_", {floats({5, 6})}},
      {"aten::zero_", {floats({5, 6})}},
      {"aten::fill_.Scalar", {floats({5, 6}), 2.0}},
      {"aten::fill_.Tensor", {floats({5, 6}), floats({})}},
      {"aten::copy_", {floats({5, 6}), floats({5, 6})}},
      {"aten::copy_", {floats({5, 6}), floats({6})}},
      {"aten::addmm_", {floats({5, 7}), floats({5, 6}), floats({6, 7})}},
      {"aten::mul.out", {floats({5, 6}), floats({6}), floats({5, 6})}},
      {"aten::mm.out", {floats({5, 6}), floats({6, 7}), floats({5, 7})}},
      {"aten::sum.IntList_out",
       {floats({5, 6}), Ints{1}, false, IValue(), floats({5})}},
  });
}

TEST(Simulation, MatrixProductsEqualPlainOnes) {
  torch::manual_seed(3);
  run_all({
      {"aten::mm", {floats({5, 6}), floats({6, 7})}},
      {"aten::mm", {floats({6, 5}).t(), floats({6, 7})}},
      {"aten::addmm", {floats({7}), floats({5, 6}), floats({6, 7})}},
      {"aten::addmm", {floats({5, 7}), floats({5, 6}), floats({6, 7})}},
      {"aten::addmm", {floats({5, 1}), floats({5, 6}), floats({6, 7})}},
      {"aten::bmm", {floats({3, 5, 6}), floats({3, 6, 2})}},
      {"aten::baddbmm",
       {floats({1, 5, 2}), floats({3, 5, 6}), floats({3, 6, 2})}},
      {"aten::mv", {floats({5, 6}), floats({6})}},
      {"aten::addmv", {floats({5}), floats({5, 6}), floats({6})}},
      {"aten::dot", {floats({6}), floats({6})}},
      {"aten::linear", {floats({2, 5, 6}), floats({7, 6}), floats({7})}},
      {"aten::linear", {floats({2, 5, 6}), floats({7, 6}), kAbsent}},
  });
}

TEST(Simulation, ViewsEqualPlainOnes) {
  torch::manual_seed(4);
  run_all({
      {"aten::view", {floats({6, 4}), Ints{-1}}},
      {"aten::view", {floats({24}), Ints{6, 4}}},
      {"aten::view", {floats({12, 8}), Ints{16, 6}}},
      {"aten::view", {floats({2, 3, 4, 5}), Ints{6, 20}}},
      {"aten::view", {floats({6, 20}), Ints{2, 3, 4, 5}}},
      {"aten::view", {floats({5, 6}), Ints{5, 1, 6}}},
      {"aten::view", {floats({1, 5, 1, 6}), Ints{5, 6}}},
      {"aten::view", {floats({2, 8, 4, 6}), Ints{64, 6}}},
      {"aten::view", {floats({}), Ints{1}}},
      {"aten::view", {floats({1, 4}), Ints{1, 4}}},
      {"aten::_unsafe_view", {floats({6, 4}), Ints{3, 8}}},
      {"aten::_reshape_alias", {floats({6, 4}), Ints{3, 8}, Ints{8, 1}}},
      {"aten::expand", {floats({5, 1, 6}), Ints{3, 5, 4, -1}}},
      {"aten::expand", {floats({}), Ints{3, 5}}},
      {"aten::transpose.int", {floats({3, 5, 6}), 0, -1}},
      {"aten::t", {floats({5, 6})}},
      {"aten::t", {floats({5})}},
      {"aten::permute", {floats({3, 5, 6}), Ints{2, 0, 1}}},
      {"aten::slice.Tensor", {floats({5, 6}), 1, 1, 5, 2}},
      {"aten::slice.Tensor", {floats({5, 6}), 0, 0, 5, 1}},
      {"aten::slice.Tensor", {floats({5, 6}), 0, -3, IValue(), 1}},
      {"aten::select.int", {floats({5, 6}), 1, -2}},
      {"aten::split.Tensor", {floats({5, 6}), 2, 0}},
      {"aten::split_with_sizes", {floats({5, 6}), Ints{1, 5}, -1}},
      {"aten::unbind.int", {floats({3, 6}), 0}},
      {"aten::unsqueeze", {floats({5, 6}), -1}},
      {"aten::unsqueeze", {floats({5, 6}), 1}},
      {"aten::squeeze", {floats({5, 1, 4})}},
      {"aten::squeeze.dim", {floats({5, 1, 4}), 1}},
      {"aten::squeeze.dim", {floats({4, 1, 4}), 0}},
      {"aten::squeeze.dims", {floats({4, 1, 4}), Ints{0, 1}}},
      {"aten::alias", {floats({5, 6})}},
      {"aten::detach", {floats({5, 6})}},
      {"aten::diagonal", {floats({5, 6, 3}), 1, 0, 1}},
      {"aten::unfold", {floats({5, 6}), 1, 3, 2}},
      {"aten::as_strided", {floats({5, 6}), Ints{2, 3}, Ints{3, 1}, IValue()}},
  });
}

TEST(Simulation, ReductionsEqualPlainOnes) {
  torch::manual_seed(5);
  for (const char* op : {"sum", "mean", "max", "min", "prod", "any", "all"}) {
    run({std::string("aten::") + op, {floats({5, 6})}});
    run({std::string("aten::") + op, {floats({1, 4})}});
  }
  for (const char* op : {"sum.dim_IntList", "mean.dim", "amax", "amin"}) {
    run({std::string("aten::") + op, {floats({3, 5, 6}), Ints{1}, false}});
    run({std::string("aten::") + op, {floats({3, 5, 6}), Ints{0, -1}, true}});
    run({std::string("aten::") + op, {floats({5, 2}), Ints{}, false}});
  }
  for (const double p : {2.0, 1.0, 3.0, 0.0, HUGE_VAL, -HUGE_VAL}) {
    run({"aten::linalg_vector_norm", {floats({5, 6}), p, IValue(), false}});
    run({"aten::linalg_vector_norm", {floats({5, 6}), p, Ints{1}, true}});
    run({"aten::norm.Scalar", {floats({5, 6}), p}});
    run({"aten::norm.ScalarOpt_dim", {floats({5, 6}), p, Ints{0}, false}});
    run(
        {"aten::_foreach_norm.Scalar",
         {list({floats({5, 6}), floats({3})}), p}});
  }
  run_all({
      {"aten::prod.dim_int", {floats({5, 6}), 1, false}},
      {"aten::any.dim", {flags({5, 6}), 1, false}},
      {"aten::all.dim", {flags({5, 6}), 0, true}},
      {"aten::var.correction", {floats({5, 6}), Ints{1}, 1, false}},
      {"aten::var_mean.correction", {floats({5, 6}), Ints{1}, 1, true}},
      {"aten::argmax", {floats({5, 6}), 1, false}},
      {"aten::argmax", {floats({5, 6}), IValue(), false}},
      {"aten::max.dim", {floats({5, 6}), 0, false}},
      {"aten::logsumexp", {floats({5, 6}), Ints{1}, false}},
      {"aten::cumsum", {floats({5, 6}), 1}},
      {"aten::sort", {floats({5, 6}), 0, false}},
      {"aten::topk", {floats({5, 6}), 2, 1}},
      {"aten::tril", {floats({3, 5, 6})}},
      {"aten::flip", {floats({5, 6}), Ints{0}}},
      {"aten::_softmax", {floats({5, 6}), 1, false}},
      {"aten::_log_softmax", {floats({5, 6}), -1, false}},
      {"aten::_softmax_backward_data",
       {floats({5, 6}),
        floats({5, 6}),
        1,
        static_cast<int64_t>(torch::kDouble)}},
      {"aten::_log_softmax_backward_data",
       {floats({5, 6}),
        floats({5, 6}),
        1,
        static_cast<int64_t>(torch::kDouble)}},
  });
}

TEST(Simulation, LossesEqualPlainOnes) {
  torch::manual_seed(6);
  at::Tensor targets = indices({5}, 4);
  targets[2] = -100;
  for (const int64_t reduction : {0, 1, 2}) {
    run(
        {"aten::nll_loss_forward",
         {floats({5, 4}), targets, kAbsent, reduction, -100}});
    run(
        {"aten::nll_loss_forward",
         {floats({5, 4}), targets, positive({4}), reduction, -100}});
    run(
        {"aten::nll_loss2d_forward",
         {floats({3, 4, 2, 5}),
          indices({3, 2, 5}, 4),
          positive({4}),
          reduction,
          -100}});
    const at::Tensor grad = reduction == 0 ? floats({5}) : floats({});
    run(
        {"aten::nll_loss_backward",
         {grad,
          floats({5, 4}),
          targets,
          positive({4}),
          reduction,
          -100,
          positive({})}});
    run({"aten::mse_loss", {floats({5, 4}), floats({5, 4}), reduction}});
    run(
        {"aten::smooth_l1_loss",
         {floats({5, 4}), floats({5, 4}), reduction, 1.0}});
    run(
        {"aten::binary_cross_entropy_with_logits",
         {floats({5, 4}),
          flags({5, 4}).to(torch::kDouble),
          kAbsent,
          kAbsent,
          reduction}});
    const at::Tensor grads = reduction == 0 ? floats({5, 4}) : floats({});
    run(
        {"aten::mse_loss_backward",
         {grads, floats({5, 4}), floats({5, 4}), reduction}});
    run(
        {"aten::smooth_l1_loss_backward",
         {grads, floats({5, 4}), floats({5, 4}), reduction, 1.0}});
  }
}

TEST(Simulation, ModulesKernelsEqualPlainOnes) {
  torch::manual_seed(7);
  run_all({
      {"aten::embedding",
       {floats({7, 4}), indices({3, 5}, 7), -1, false, false}},
      {"aten::embedding_dense_backward",
       {floats({3, 5, 4}), indices({3, 5}, 7), 7, -1, false}},
      {"aten::embedding_dense_backward",
       {floats({3, 5, 4}), indices({3, 5}, 7), 7, 2, true}},
      {"aten::native_layer_norm",
       {floats({3, 5, 4}), Ints{4}, floats({4}), floats({4}), 1e-5}},
      {"aten::native_layer_norm",
       {floats({5, 4}), Ints{5, 4}, kAbsent, kAbsent, 1e-5}},
      {"aten::native_layer_norm_backward",
       {floats({3, 5, 4}),
        floats({3, 5, 4}),
        Ints{4},
        floats({3, 5, 1}),
        positive({3, 5, 1}),
        floats({4}),
        floats({4}),
        std::vector<bool>{true, true, true}}},
      {"aten::_fused_rms_norm",
       {floats({3, 5, 4}), Ints{4}, floats({4}), 1e-5}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {floats({3, 4, 5, 8}),
        floats({3, 4, 6, 8}),
        floats({3, 4, 6, 8}),
        0.0,
        false}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {floats({3, 5, 4, 8}).transpose(1, 2),
        floats({3, 2, 5, 8}),
        floats({3, 2, 5, 8}),
        0.0,
        true}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {floats({3, 4, 5, 8}),
        floats({3, 4, 6, 8}),
        floats({3, 4, 6, 8}),
        0.0,
        false,
        floats({1, 1, 5, 6})}},
  });
  const at::Tensor q = floats({3, 4, 5, 8});
  const at::Tensor k = floats({3, 2, 5, 8});
  const auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, true);
  run(
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       {floats({3, 4, 5, 8}), q, k, k, out, lse, 0.0, true}});
}

TEST(Simulation, FactoriesEqualPlainOnes) {
  torch::manual_seed(8);
  run_all({
      {"aten::zeros_like", {floats({5, 6})}},
      {"aten::ones_like", {floats({6, 5}).t()}},
      {"aten::full_like", {floats({5, 6}), 2.5}},
      {"aten::new_zeros", {floats({5, 6}), Ints{5, 6}}},
      {"aten::new_ones", {floats({5, 6}), Ints{2, 3}}},
      {"aten::new_full", {floats({5, 6}), Ints{5, 6}, 2.0}},
  });
}

TEST(Simulation, IndexingAndJoiningEqualPlainOnes) {
  torch::manual_seed(9);
  run_all({
      {"aten::index_select", {floats({5, 6}), 0, indices({4}, 5)}},
      {"aten::gather", {floats({5, 6}), 1, indices({5, 3}, 6)}},
      {"aten::gather", {floats({5, 6}), 1, indices({4, 3}, 6)}},
      {"aten::scatter.src",
       {floats({5, 6}),
        1,
        torch::arange(3).expand({5, 3}).contiguous(),
        floats({5, 3})}},
      {"aten::scatter.value", {floats({5, 6}), 1, indices({5, 3}, 6), 2.0}},
      {"aten::scatter_add",
       {floats({5, 6}), 0, indices({3, 6}, 5), floats({3, 6})}},
      {"aten::index_add",
       {floats({5, 6}), 0, indices({3}, 5), floats({3, 6}), 1}},
      {"aten::slice_backward", {floats({5, 3}), Ints{5, 6}, 1, 1, 4, 1}},
      {"aten::select_backward", {floats({5}), Ints{5, 6}, 1, 2}},
      {"aten::constant_pad_nd", {floats({5, 6}), Ints{1, 2}, 0.0}},
      {"aten::constant_pad_nd", {floats({5, 6}), Ints{0, 0, 1, 2}, 1.0}},
      {"aten::repeat", {floats({5, 6}), Ints{2, 1, 3}}},
      {"aten::cat", {list({floats({5, 6}), floats({2, 6})}), 0}},
      {"aten::cat",
       {list({floats({5, 6}), floats({5, 6}), floats({5, 1})}), -1}},
      {"aten::stack", {list({floats({5, 6}), floats({5, 6})}), 1}},
  });
}

TEST(Simulation, ListOperatorsEqualPlainOnes) {
  torch::manual_seed(10);
  const auto two = [] { return list({floats({5, 6}), floats({3})}); };
  const auto squares = [] { return list({positive({5, 6}), positive({3})}); };
  run_all({
      {"aten::_foreach_add.List", {two(), two()}},
      {"aten::_foreach_add_.List", {two(), two(), 2.0}},
      {"aten::_foreach_add_.Scalar", {two(), 2.0}},
      {"aten::_foreach_mul_.Scalar", {two(), 2.0}},
      {"aten::_foreach_mul_.List", {two(), two()}},
      {"aten::_foreach_mul_.Tensor", {two(), floats({})}},
      {"aten::_foreach_sqrt", {squares()}},
      {"aten::_foreach_lerp_.Scalar", {two(), two(), 0.2}},
      {"aten::_foreach_addcmul_.Scalar", {two(), two(), two(), 0.2}},
      {"aten::_foreach_addcdiv_.ScalarList",
       {two(), two(), squares(), c10::List<at::Scalar>({0.2, 0.3})}},
      {"aten::_foreach_copy_", {two(), two()}},
      {"aten::_foreach_zero_", {two()}},
  });
  const auto none = [] { return c10::List<at::Tensor>(); };
  const auto steps = [] { return list({torch::ones({}), torch::ones({})}); };
  run_all({
      {"aten::_fused_adamw_",
       {two(),
        two(),
        two(),
        squares(),
        none(),
        steps(),
        0.1,
        0.9,
        0.99,
        0.01,
        1e-8,
        false,
        false,
        kAbsent,
        kAbsent}},
      {"aten::_fused_sgd_",
       {two(),
        two(),
        two(),
        0.01,
        0.9,
        0.1,
        0.0,
        false,
        false,
        false,
        kAbsent,
        kAbsent}},
  });
}

} // namespace
} // namespace tessera::simulation
