// SPDX-License-Identifier: Apache-2.0
// Every operator of a training step on every placement of its operands, forward
// and backward, against the plain operator.
#include <gtest/gtest.h>
#include <tessera/dtensor/test_tensors.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using test_tensors::line;
using test_tensors::seeded_positive;

using Tensors = std::vector<at::Tensor>;
using Call = std::function<at::Tensor(const Tensors&)>;

struct Operator {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
  Call call;
};

at::Tensor labels(at::IntArrayRef sizes, int64_t classes, int64_t ignored) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  at::Tensor result = (torch::arange(numel) * 7).remainder(classes).view(sizes);
  return ignored < 0 ? result.masked_fill(result == 1, ignored) : result;
}

using Operators = std::vector<Operator>;

Operators arithmetic_operators() {
  return {
      {"add", {{5, 3}, {5, 3}}, [](const Tensors& t) { return t[0] + t[1]; }},
      {"add broadcast",
       {{5, 3}, {3}},
       [](const Tensors& t) { return t[0] + t[1]; }},
      {"add column",
       {{5, 3}, {5, 1}},
       [](const Tensors& t) { return t[0] + t[1]; }},
      {"add scalar", {{5, 3}}, [](const Tensors& t) { return t[0] + 2; }},
      {"sub alpha",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) { return t[0].sub(t[1], 3); }},
      {"rsub", {{5, 3}}, [](const Tensors& t) { return 1 - t[0]; }},
      {"mul", {{5, 3}, {5, 3}}, [](const Tensors& t) { return t[0] * t[1]; }},
      {"mul scalar", {{5, 3}}, [](const Tensors& t) { return t[0] * 3; }},
      {"square", {{5, 3}}, [](const Tensors& t) { return t[0] * t[0]; }},
      {"div", {{5, 3}, {5, 3}}, [](const Tensors& t) { return t[0] / t[1]; }},
      {"pow", {{5, 3}}, [](const Tensors& t) { return t[0].pow(3); }},
  };
}

Operators unary_operators() {
  return {
      {"rsqrt", {{5, 3}}, [](const Tensors& t) { return t[0].rsqrt(); }},
      {"silu", {{5, 3}}, [](const Tensors& t) { return torch::silu(t[0]); }},
      {"gelu", {{5, 3}}, [](const Tensors& t) { return torch::gelu(t[0]); }},
      {"relu", {{5, 3}}, [](const Tensors& t) { return (t[0] - 1).relu(); }},
      {"tanh", {{5, 3}}, [](const Tensors& t) { return t[0].tanh(); }},
      {"exp", {{5, 3}}, [](const Tensors& t) { return t[0].exp(); }},
      {"where",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) {
         return torch::where(t[0] > t[1], t[0], t[1] * 2);
       }},
      {"masked_fill",
       {{5, 3}},
       [](const Tensors& t) { return t[0].masked_fill(t[0] > 1, -3); }},
      {"clamp",
       {{5, 3}},
       [](const Tensors& t) { return t[0].clamp(0.7, 1.2); }},
      {"in place",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) {
         at::Tensor y = t[0] * 1;
         y.add_(t[1]).mul_(t[1]).div_(2).addcmul_(t[1], t[1], 3);
         return y;
       }},
      {"addcdiv",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) { return t[0].addcdiv(t[1], t[1] + 1, 2); }},
      {"lerp",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) { return t[0].lerp(t[1], 0.3); }},
      {"to double",
       {{5, 3}},
       [](const Tensors& t) { return t[0].to(torch::kDouble) * 2; }},
      {"clone",
       {{5, 3}},
       [](const Tensors& t) { return t[0].clone().t().clone() * 2; }},
      {"plain operand",
       {{5, 3}},
       [](const Tensors& t) {
         return t[0] * torch::arange(3) + torch::ones({5, 1});
       }},
      {"foreach",
       {{5, 3}, {4}},
       [](const Tensors& t) {
         const Tensors r = at::_foreach_mul(at::_foreach_add(t, 1), t);
         return r[0].sum() + r[1].sum();
       }},
  };
}

Operators product_operators() {
  return {
      {"mm", {{5, 3}, {3, 4}}, [](const Tensors& t) { return t[0].mm(t[1]); }},
      {"addmm",
       {{4}, {5, 3}, {3, 4}},
       [](const Tensors& t) { return torch::addmm(t[0], t[1], t[2], 2, 3); }},
      {"bmm",
       {{2, 5, 3}, {2, 3, 4}},
       [](const Tensors& t) { return t[0].bmm(t[1]); }},
      {"baddbmm",
       {{2, 5, 4}, {2, 5, 3}, {2, 3, 4}},
       [](const Tensors& t) { return torch::baddbmm(t[0], t[1], t[2]); }},
      {"matmul 3d 2d",
       {{2, 5, 3}, {3, 4}},
       [](const Tensors& t) { return t[0].matmul(t[1]); }},
      {"matmul 4d",
       {{2, 3, 5, 3}, {2, 3, 3, 4}},
       [](const Tensors& t) { return t[0].matmul(t[1]); }},
      {"linear",
       {{5, 3}, {4, 3}, {4}},
       [](const Tensors& t) { return torch::linear(t[0], t[1], t[2]); }},
      {"linear 3d",
       {{2, 5, 3}, {4, 3}, {4}},
       [](const Tensors& t) { return torch::linear(t[0], t[1], t[2]); }},
      {"mv", {{5, 3}, {3}}, [](const Tensors& t) { return t[0].mv(t[1]); }},
      {"dot", {{5}, {5}}, [](const Tensors& t) { return t[0].dot(t[1]); }},
      {"attention",
       {{2, 3, 5, 4}, {2, 3, 5, 4}, {2, 3, 5, 4}},
       [](const Tensors& t) {
         return torch::scaled_dot_product_attention(
             t[0], t[1], t[2], {}, 0, true);
       }},
      {"attention masked",
       {{2, 3, 5, 4}, {2, 3, 6, 4}},
       [](const Tensors& t) {
         return torch::scaled_dot_product_attention(
             t[0], t[1], t[1], torch::ones({5, 6}).triu() * -2);
       }},
      {"conv",
       {{3, 2, 6}, {4, 2, 3}},
       [](const Tensors& t) { return torch::conv1d(t[0], t[1]); }},
  };
}

Operators view_operators() {
  return {
      {"view",
       {{6, 4}},
       [](const Tensors& t) {
         return t[0].view({2, 3, 2, 2}) * 2;
       }},
      {"view merge",
       {{5, 2, 3}},
       [](const Tensors& t) {
         return t[0].view({10, 3}).view({-1}) * 2;
       }},
      {"reshape of transpose",
       {{4, 6}},
       [](const Tensors& t) {
         return t[0].t().reshape({3, 8}) * 2;
       }},
      {"permute",
       {{2, 3, 4}},
       [](const Tensors& t) {
         return t[0].permute({2, 0, 1}).contiguous() * 2;
       }},
      {"transpose view",
       {{2, 4, 6}},
       [](const Tensors& t) {
         return t[0].transpose(1, 2).unsqueeze(0).squeeze(0) * 2;
       }},
      {"expand",
       {{5, 1}},
       [](const Tensors& t) {
         return t[0].expand({5, 4}) * 2;
       }},
      {"slice",
       {{5, 6}},
       [](const Tensors& t) {
         return t[0].slice(0, 1, 4).slice(1, 0, 6, 2) * 2;
       }},
      {"select",
       {{5, 6}},
       [](const Tensors& t) { return t[0].select(0, 3) * t[0].select(0, 1); }},
      {"split",
       {{5, 6}},
       [](const Tensors& t) {
         return t[0].split(2, 0)[2] * t[0].split({1, 4}, 0)[0];
       }},
      {"unbind",
       {{4, 3}},
       [](const Tensors& t) {
         return t[0].unbind(0)[1] * t[0].unbind(1)[2].sum();
       }},
      {"cat",
       {{5, 3}, {2, 3}},
       [](const Tensors& t) {
         return torch::cat({t[0], t[1], t[0]}, 0) * 2;
       }},
      {"stack",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) {
         return torch::stack({t[0], t[1]}, 1) * 2;
       }},
  };
}

Operators lookup_operators() {
  return {
      {"embedding",
       {{7, 4}},
       [](const Tensors& t) {
         return torch::embedding(t[0], labels({3, 5}, 7, 0));
       }},
      {"max dim",
       {{5, 3}},
       [](const Tensors& t) {
         return std::get<0>(t[0].max(0)) + std::get<0>(t[0].min(1, true));
       }},
      {"topk and sort",
       {{5, 3}},
       [](const Tensors& t) {
         return std::get<0>(t[0].topk(2, 0)).sum() +
             std::get<0>(t[0].sort(1)) * t[0];
       }},
      {"index",
       {{5, 3}},
       [](const Tensors& t) {
         return t[0].index({torch::tensor({0, 2, 2})});
       }},
      {"gather",
       {{5, 3}},
       [](const Tensors& t) {
         return t[0].gather(0, labels({4, 3}, 5, 0));
       }},
  };
}

Operators reduction_operators() {
  return {
      {"sum", {{5, 3}}, [](const Tensors& t) { return t[0].sum() * 2; }},
      {"sum dim",
       {{5, 3, 2}},
       [](const Tensors& t) {
         return t[0].sum({0, 2}, true) * 2;
       }},
      {"mean", {{5, 3}}, [](const Tensors& t) { return t[0].mean() * 2; }},
      {"mean dim",
       {{5, 3}},
       [](const Tensors& t) { return t[0].mean({0}) * 2; }},
      {"amax",
       {{5, 3}},
       [](const Tensors& t) { return t[0].amax({0}) + t[0].amax(); }},
      {"max",
       {{5, 3}},
       [](const Tensors& t) { return t[0].max() + t[0].min(); }},
      {"norm",
       {{5, 3}},
       [](const Tensors& t) {
         return t[0].norm() + t[0].norm(1) + t[0].norm(3.5);
       }},
      {"norm dim",
       {{5, 3}},
       [](const Tensors& t) {
         return torch::linalg_vector_norm(t[0], 2, {0});
       }},
      {"norm inf",
       {{5, 3}},
       [](const Tensors& t) {
         return torch::linalg_vector_norm(t[0], INFINITY);
       }},
      {"var", {{5, 3}}, [](const Tensors& t) { return t[0].var({0}, true); }},
      {"cumsum", {{5, 3}}, [](const Tensors& t) { return t[0].cumsum(0); }},
      {"softmax",
       {{5, 3}},
       [](const Tensors& t) { return t[0].softmax(-1) * t[0].softmax(0); }},
      {"log_softmax",
       {{5, 3}},
       [](const Tensors& t) { return t[0].log_softmax(1); }},
      {"layer_norm",
       {{2, 5, 4}, {4}, {4}},
       [](const Tensors& t) {
         return torch::layer_norm(t[0], {4}, t[1], t[2]);
       }},
      {"rms_norm",
       {{2, 5, 4}, {4}},
       [](const Tensors& t) { return torch::rms_norm(t[0], {4}, t[1], 1e-5); }},
  };
}

Operators loss_operators() {
  return {
      {"cross entropy",
       {{6, 4}},
       [](const Tensors& t) {
         return torch::cross_entropy_loss(t[0], labels({6}, 4, 0));
       }},
      {"cross entropy weighted",
       {{6, 4}, {4}},
       [](const Tensors& t) {
         return torch::cross_entropy_loss(
             t[0], labels({6}, 4, -100), t[1].detach());
       }},
      {"cross entropy sum",
       {{6, 4}},
       [](const Tensors& t) {
         return torch::cross_entropy_loss(
             t[0], labels({6}, 4, -100), {}, at::Reduction::Sum);
       }},
      {"cross entropy none",
       {{6, 4}},
       [](const Tensors& t) {
         return torch::cross_entropy_loss(
             t[0], labels({6}, 4, -100), {}, at::Reduction::None);
       }},
      {"cross entropy smoothed",
       {{6, 4}},
       [](const Tensors& t) {
         return torch::cross_entropy_loss(
             t[0], labels({6}, 4, 0), {}, at::Reduction::Mean, -100, 0.1);
       }},
      {"mse",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) { return torch::mse_loss(t[0], t[1]); }},
      {"bce logits",
       {{5, 3}, {5, 3}},
       [](const Tensors& t) {
         return torch::binary_cross_entropy_with_logits(t[0], t[1].detach());
       }},
  };
}

// A plain tensor beside distributed ones counts as replicated.
const Operators& operators() {
  static const Operators all = [] {
    Operators result;
    for (const Operators& part :
         {arithmetic_operators(),
          unary_operators(),
          product_operators(),
          view_operators(),
          lookup_operators(),
          reduction_operators(),
          loss_operators()}) {
      result.insert(result.end(), part.begin(), part.end());
    }
    return result;
  }();
  return all;
}

struct Result {
  at::Tensor value;
  Tensors gradients;
};

// Forward, then backward with a weighting that tells elements apart.
Result evaluate(const Operator& op, const Tensors& inputs) {
  Result result;
  const at::Tensor value = op.call(inputs);
  const at::Tensor weight =
      torch::arange(value.numel(), value.scalar_type()).view(value.sizes()) + 1;
  if (value.requires_grad()) {
    (value * weight).sum().backward();
  }
  result.value = is_dtensor(value) ? full_tensor(value.detach()) : value;
  for (const at::Tensor& input : inputs) {
    const at::Tensor& gradient = input.grad();
    result.gradients.push_back(
        gradient.defined() && is_dtensor(gradient) ? full_tensor(gradient)
                                                   : gradient);
  }
  return result;
}

Tensors plain_inputs(const Operator& op) {
  Tensors inputs;
  for (size_t i = 0; i < op.shapes.size(); ++i) {
    inputs.push_back(seeded_positive(op.shapes[i], i + 1).requires_grad_());
  }
  return inputs;
}

// All placements that one mesh axis may give a tensor.
Placements placements_for(const std::vector<int64_t>& shape) {
  Placements result{Replicate{}, Partial{}};
  for (size_t d = 0; d < shape.size(); ++d) {
    result.emplace_back(Shard(static_cast<int64_t>(d)));
  }
  return result;
}

void expect_same(
    const at::Tensor& got,
    const at::Tensor& expected,
    const std::string& what) {
  ASSERT_EQ(got.defined(), expected.defined()) << what;
  if (got.defined()) {
    EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5))
        << what << "\n"
        << got << "\nexpected\n"
        << expected;
  }
}

void check_case(
    const Operator& op,
    const DeviceMesh& mesh,
    const std::vector<Placements>& placements,
    const Result& expected) {
  std::string what = op.name;
  Tensors inputs;
  const Tensors plain = plain_inputs(op);
  for (size_t i = 0; i < plain.size(); ++i) {
    what += " " + str(placements[i]);
    inputs.push_back(
        distribute(plain[i].detach(), mesh, placements[i]).requires_grad_());
  }
  SCOPED_TRACE(what);
  try {
    const Result got = evaluate(op, inputs);
    expect_same(got.value, expected.value, what + " value");
    for (size_t i = 0; i < inputs.size(); ++i) {
      expect_same(got.gradients[i], expected.gradients[i], what + " gradient");
    }
  } catch (const std::exception& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
}

class OperatorOn : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OperatorOn, testing::Values(1, 2, 3, 4));

// Each operand in turn in each placement, the others replicated; then all
// alike on dim 0.
TEST_P(OperatorOn, OneAxisEqualsThePlainOperator) {
  for (const Operator& op : operators()) {
    const Result expected = evaluate(op, plain_inputs(op));
    run_ranks(GetParam(), [&](World world) {
      const DeviceMesh mesh = line(world);
      const size_t n = op.shapes.size();
      for (size_t i = 0; i < n; ++i) {
        for (const Placement& placement : placements_for(op.shapes[i])) {
          std::vector<Placements> placements(n, {Replicate{}});
          placements[i] = {placement};
          check_case(op, mesh, placements, expected);
        }
      }
      check_case(op, mesh, std::vector<Placements>(n, {Shard(0)}), expected);
    });
  }
}

TEST(Operators, TwoAxesEqualThePlainOperator) {
  for (const Operator& op : operators()) {
    const Result expected = evaluate(op, plain_inputs(op));
    run_ranks(4, [&](World world) {
      const DeviceMesh mesh = make_mesh(world, {{"x", 2}, {"y", 2}});
      const size_t n = op.shapes.size();
      for (const Placement& first : placements_for(op.shapes[0])) {
        for (const Placement& second : placements_for(op.shapes[0])) {
          std::vector<Placements> placements(n, {Replicate{}, Replicate{}});
          placements[0] = {first, second};
          check_case(op, mesh, placements, expected);
        }
      }
    });
  }
}

} // namespace
} // namespace tessera
