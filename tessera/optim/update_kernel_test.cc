// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <tessera/base/error.h>
#include <tessera/comm/reduce_kernels.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/update_kernel.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace tessera {
namespace {

using torch::optim::Optimizer;
using Tensors = std::vector<at::Tensor>;

// A rule and options, and torch's own optimizer for them.
struct Case {
  std::string name;
  UpdateRule rule;
  std::shared_ptr<ParamOptions> options;
  std::function<std::unique_ptr<Optimizer>(const at::Tensor&)> reference;
};

template <typename Reference, typename Options>
Case make_case(
    const std::string& name, UpdateRule rule, const Options& options) {
  return {
      name,
      rule,
      std::make_shared<Options>(options),
      [options](const at::Tensor& param) -> std::unique_ptr<Optimizer> {
        return std::make_unique<Reference>(Tensors{param}, options);
      }};
}

void add_adams(std::vector<Case>& cases) {
  for (const double decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      const std::string name =
          (amsgrad ? "/amsgrad" : "") + std::string(decay > 0 ? "/decay" : "");
      cases.push_back(make_case<torch::optim::AdamW>(
          "AdamW" + name,
          UpdateRule::kAdamW,
          torch::optim::AdamWOptions(0.01).weight_decay(decay).amsgrad(
              amsgrad)));
      cases.push_back(make_case<torch::optim::Adam>(
          "Adam" + name,
          UpdateRule::kAdam,
          torch::optim::AdamOptions(0.01)
              .betas({0.8, 0.95})
              .eps(1e-6)
              .weight_decay(decay)
              .amsgrad(amsgrad)));
    }
  }
}

void add_sgds(std::vector<Case>& cases) {
  using torch::optim::SGDOptions;
  const auto add = [&](const std::string& name, const SGDOptions& options) {
    cases.push_back(
        make_case<torch::optim::SGD>("SGD" + name, UpdateRule::kSgd, options));
  };
  for (const double decay : {0.0, 0.1}) {
    const auto options = [&] { return SGDOptions(0.05).weight_decay(decay); };
    const std::string name = decay > 0 ? "/decay" : "";
    add(name, options());
    add("/momentum" + name, options().momentum(0.9));
    add("/dampening" + name, options().momentum(0.9).dampening(0.3));
    add("/nesterov" + name, options().momentum(0.9).nesterov(true));
  }
}

void add_others(std::vector<Case>& cases) {
  for (const double decay : {0.0, 0.1}) {
    const std::string name = decay > 0 ? "/decay" : "";
    for (const double momentum : {0.0, 0.9}) {
      for (const bool centered : {false, true}) {
        cases.push_back(make_case<torch::optim::RMSprop>(
            std::string("RMSprop") + (momentum > 0 ? "/momentum" : "") +
                (centered ? "/centered" : "") + name,
            UpdateRule::kRmsprop,
            torch::optim::RMSpropOptions(0.01)
                .momentum(momentum)
                .centered(centered)
                .alpha(0.9)
                .weight_decay(decay)));
      }
    }
    cases.push_back(make_case<torch::optim::Adagrad>(
        "Adagrad" + name,
        UpdateRule::kAdagrad,
        torch::optim::AdagradOptions(0.1).weight_decay(decay)));
    cases.push_back(make_case<torch::optim::Adagrad>(
        "Adagrad/lr_decay/initial" + name,
        UpdateRule::kAdagrad,
        torch::optim::AdagradOptions(0.1)
            .lr_decay(0.2)
            .initial_accumulator_value(0.25)
            .weight_decay(decay)));
    cases.push_back(make_case<Lion>(
        "Lion" + name,
        UpdateRule::kLion,
        LionOptions(0.01).weight_decay(decay)));
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_adams(cases);
  add_sgds(cases);
  add_others(cases);
  return cases;
}

at::Tensor normal(int64_t numel, uint64_t seed, c10::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn({numel}, generator, torch::kDouble).to(dtype);
}

// A tensor that is updated, with its states.
struct Updated {
  at::Tensor parameter;
  Tensors states;
  at::Tensor master = {};

  Updated(const Case& c, const at::Tensor& value, c10::ScalarType state_type)
      : parameter(value.clone()) {
    for (const StateField& field : state_fields(c.rule, *c.options)) {
      states.push_back(torch::full_like(
          value, field.initial, value.options().dtype(state_type)));
    }
  }
  Updated(const Case& c, const at::Tensor& value)
      : Updated(c, value, value.scalar_type()) {}
};

// The part [begin, end) of a step's range.
struct Part {
  int64_t begin;
  int64_t end;
};

struct StepInput {
  Tensors gradients;
  bool average = false;
  Tensors copies = {};
};

char* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(tensor.data_ptr()) +
      index * static_cast<int64_t>(tensor.element_size());
}

void update_part(
    const Case& c,
    Updated& updated,
    const StepInput& input,
    const UpdateStep& step,
    Part part) {
  std::vector<const void*> gradients;
  for (const at::Tensor& gradient : input.gradients) {
    gradients.push_back(element(gradient, part.begin));
  }
  std::vector<void*> copies;
  for (const at::Tensor& copy : input.copies) {
    copies.push_back(element(copy, part.begin));
  }
  UpdateRange range;
  range.parameter = element(updated.parameter, part.begin);
  range.parameter_type = updated.parameter.scalar_type();
  range.master = updated.master.defined()
      ? updated.master.data_ptr<float>() + part.begin
      : nullptr;
  range.gradients = gradients;
  range.gradient_type = input.gradients[0].scalar_type();
  range.average = input.average;
  for (size_t i = 0; i < updated.states.size(); ++i) {
    range.states[i] = element(updated.states[i], part.begin);
  }
  range.copies = copies;
  range.numel = part.end - part.begin;
  range.first_element = part.begin;
  run_update(c.rule, *c.options, step, range);
}

void update(
    const Case& c,
    Updated& updated,
    const StepInput& input,
    const UpdateStep& step) {
  update_part(c, updated, input, step, {0, updated.parameter.numel()});
}

// How far `a` is from `b`, in relation to b's norm.
double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.to(torch::kDouble);
  const auto norm = wide.norm().item<double>();
  return norm == 0 ? (b.numel() == 0 ? 0 : 1)
                   : (a.to(torch::kDouble) - wide).norm().item<double>() / norm;
}

void expect_like_torch(const Case& c, int64_t numel, c10::ScalarType dtype) {
  const at::Tensor value = normal(numel, 1, dtype);
  at::Tensor plain = value.clone().set_requires_grad(true);
  const auto reference = c.reference(plain);
  Updated updated(c, value);
  for (int64_t step = 1; step <= 10; ++step) {
    const auto seed = static_cast<uint64_t>(step % 4) + 2;
    const at::Tensor gradient = normal(numel, seed, dtype);
    plain.mutable_grad() = gradient.clone();
    reference->step();
    update(c, updated, {{gradient}}, {.step = step});
  }
  const double tolerance = dtype == torch::kDouble ? 1e-13 : 1e-6;
  EXPECT_LE(distance(updated.parameter, plain.detach()), tolerance)
      << c.name << " " << numel << " " << dtype;
  if (numel == 0) {
    return;
  }
  auto& state = reference->state();
  const Tensors expected =
      state.empty() ? Tensors() : tensors_of(c.rule, *state.begin()->second);
  ASSERT_EQ(expected.size(), updated.states.size()) << c.name;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(distance(updated.states[i], expected[i]), tolerance)
        << c.name << " state " << i;
  }
}

TEST(UpdateKernel, StepsLikeTorchUnderEveryOption) {
  for (const Case& c : all_cases()) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      for (const int64_t numel : {0, 1, 63, 64, 65, 1000}) {
        expect_like_torch(c, numel, dtype);
      }
    }
  }
}

TEST(UpdateKernel, StepsLikeTorchOnManyElements) {
  for (const Case& c : all_cases()) {
    if (c.name.find("/decay") != std::string::npos) {
      expect_like_torch(c, 1000003, torch::kFloat);
    }
  }
}

TEST(UpdateKernel, TakesUpAtAnyStep) {
  for (const Case& c : all_cases()) {
    at::Tensor plain = normal(100, 1, torch::kFloat).set_requires_grad(true);
    const auto reference = c.reference(plain);
    for (int64_t step = 1; step <= 7; ++step) {
      plain.mutable_grad() = normal(100, 2, torch::kFloat);
      reference->step();
    }
    Updated updated(c, plain.detach());
    auto& state = reference->state();
    for (size_t i = 0; i < updated.states.size(); ++i) {
      updated.states[i].copy_(tensors_of(c.rule, *state.begin()->second)[i]);
    }
    const at::Tensor gradient = normal(100, 3, torch::kFloat);
    plain.mutable_grad() = gradient.clone();
    reference->step();
    update(c, updated, {{gradient}}, {.step = 8});
    EXPECT_LE(distance(updated.parameter, plain.detach()), 1e-6) << c.name;
  }
}

// libtorch's threads, as they were before.
struct Threads {
  const int count = at::get_num_threads();
  ~Threads() {
    at::set_num_threads(count);
  }
};

// The numbers of a whole range, of its parts, and of several threads.
TEST(UpdateKernel, DoesNotDependOnCutsOrThreads) {
  const int64_t numel = 100003;
  const Threads restored;
  for (const Case& c : all_cases()) {
    const at::Tensor value = normal(numel, 1, torch::kFloat);
    const StepInput input{{normal(numel, 2, torch::kFloat)}};
    Updated whole(c, value);
    at::set_num_threads(1);
    update(c, whole, input, {});
    Updated threaded(c, value);
    at::set_num_threads(3);
    update(c, threaded, input, {});
    Updated cut(c, value);
    for (const Part part : {Part{0, 1}, {1, 70000}, {70000, numel}}) {
      update_part(c, cut, input, {}, part);
    }
    EXPECT_TRUE(whole.parameter.equal(threaded.parameter)) << c.name;
    EXPECT_TRUE(whole.parameter.equal(cut.parameter)) << c.name;
  }
}

TEST(UpdateKernel, MultipliesGradientsByTheScale) {
  for (const Case& c : all_cases()) {
    const at::Tensor value = normal(1000, 1, torch::kFloat);
    const at::Tensor gradient = normal(1000, 2, torch::kFloat);
    Updated scaled(c, value);
    update(c, scaled, {{gradient}}, {.gradient_scale = 0.375});
    Updated expected(c, value);
    update(c, expected, {{gradient * 0.375}}, {});
    EXPECT_TRUE(scaled.parameter.equal(expected.parameter)) << c.name;
  }
}

at::Tensor reduced(const StepInput& input) {
  at::Tensor out = torch::empty_like(input.gradients[0]);
  std::vector<const std::byte*> sources;
  for (const at::Tensor& gradient : input.gradients) {
    sources.push_back(reinterpret_cast<const std::byte*>(element(gradient, 0)));
  }
  reduce_in_order(
      out.scalar_type(),
      input.average ? ReduceOp::kAvg : ReduceOp::kSum,
      sources,
      reinterpret_cast<std::byte*>(element(out, 0)),
      out.numel());
  return out;
}

TEST(UpdateKernel, SumsGradientsAsReduceScatterDoesAndWritesCopies) {
  const int64_t numel = 5003;
  for (const Case& c : all_cases()) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      StepInput input;
      for (uint64_t rank = 0; rank < 3; ++rank) {
        input.gradients.push_back(normal(numel, rank + 5, dtype));
        input.copies.push_back(torch::empty({numel}));
      }
      const at::Tensor value = normal(numel, 1, torch::kFloat);
      for (const bool average : {false, true}) {
        input.average = average;
        Updated fused(c, value);
        update(c, fused, input, {});
        Updated separate(c, value);
        update(c, separate, {{reduced(input)}}, {});
        EXPECT_TRUE(fused.parameter.equal(separate.parameter)) << c.name;
        for (const at::Tensor& copy : input.copies) {
          EXPECT_TRUE(copy.equal(fused.parameter)) << c.name;
        }
      }
    }
  }
}

TEST(UpdateKernel, KeepsFloat32MastersOfNarrowParameters) {
  const int64_t numel = 5003;
  for (const Case& c : all_cases()) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      const at::Tensor value = normal(numel, 1, torch::kFloat);
      Updated updated(c, value.to(dtype), torch::kFloat);
      updated.master = value.clone();
      const at::Tensor copy = torch::empty({numel}, dtype);
      const StepInput input{{normal(numel, 2, dtype)}, false, {copy}};
      update(c, updated, input, {});
      Updated expected(c, value);
      update(c, expected, {{input.gradients[0].to(torch::kFloat)}}, {});
      EXPECT_TRUE(updated.master.equal(expected.parameter)) << c.name;
      EXPECT_TRUE(updated.parameter.equal(updated.master.to(dtype))) << c.name;
      EXPECT_TRUE(copy.equal(updated.parameter)) << c.name;
    }
  }
}

TEST(UpdateKernel, WorksOnNarrowValuesWithoutMasters) {
  for (const Case& c : all_cases()) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      const at::Tensor value = normal(999, 1, dtype);
      const at::Tensor gradient = normal(999, 2, dtype);
      Updated updated(c, value);
      update(c, updated, {{gradient}}, {});
      Updated wide(c, value.to(torch::kFloat));
      update(c, wide, {{gradient.to(torch::kFloat)}}, {});
      EXPECT_TRUE(updated.parameter.equal(wide.parameter.to(dtype))) << c.name;
      for (size_t i = 0; i < wide.states.size(); ++i) {
        EXPECT_TRUE(updated.states[i].equal(wide.states[i].to(dtype)))
            << c.name;
      }
    }
  }
}

// SGD of rate 1 on zeros with this gradient: the master becomes `value`.
Updated round_stochastically(
    const at::Tensor& value, c10::ScalarType dtype, uint64_t seed, Part part) {
  static const Case sgd = make_case<torch::optim::SGD>(
      "SGD", UpdateRule::kSgd, torch::optim::SGDOptions(1.0));
  Updated updated(sgd, torch::zeros_like(value).to(dtype), torch::kFloat);
  updated.master = torch::zeros_like(value);
  update_part(sgd, updated, {{-value}}, {.rounding_seed = seed}, part);
  return updated;
}

// A normal number, one that float16 holds as a subnormal, and a negative one;
// each lies a fourth of the way from its lower to its upper neighbour.
TEST(UpdateKernel, RoundsUpAsOftenAsTheValueIsNearTheUpperNeighbour) {
  const int64_t draws = 40000;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const double unit = dtype == torch::kHalf ? 0x1p-10 : 0x1p-7;
    const double tiny = dtype == torch::kHalf ? 0x1p-24 : 0x1p-32;
    const std::vector<std::pair<double, double>> values = {
        {1.0, unit}, {5 * tiny, tiny}, {-1.0, -unit}};
    for (const auto& [low, step] : values) {
      if (dtype == torch::kBFloat16 && low == 5 * tiny) {
        continue; // bfloat16 has float's exponents
      }
      const auto exact = static_cast<float>(low + step / 4);
      const Updated updated = round_stochastically(
          torch::full({draws}, exact), dtype, 7, {0, draws});
      const at::Tensor up =
          (updated.parameter.to(torch::kDouble) - low).div(step);
      EXPECT_TRUE((up.eq(0) | up.eq(1)).all().item<bool>()) << low;
      EXPECT_NEAR(up.mean().item<double>(), 0.25, 0.01) << low;
    }
  }
}

TEST(UpdateKernel, KeepsRepresentableAndInfiniteValuesWhenRounding) {
  const float infinity = std::numeric_limits<float>::infinity();
  const at::Tensor value =
      torch::tensor({0.0F, -0.0F, 1.5F, -3.0F, infinity, -infinity});
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const Updated updated = round_stochastically(value, dtype, 3, {0, 6});
    EXPECT_TRUE(updated.parameter.to(torch::kFloat).equal(value));
  }
}

TEST(UpdateKernel, DrawsByTheGlobalIndexOfTheElement) {
  const at::Tensor value = normal(3001, 1, torch::kFloat);
  const Updated whole =
      round_stochastically(value, torch::kBFloat16, 11, {0, 3001});
  const Updated part =
      round_stochastically(value, torch::kBFloat16, 11, {1234, 3001});
  EXPECT_TRUE(
      whole.parameter.slice(0, 1234).equal(part.parameter.slice(0, 1234)));
  const Updated other =
      round_stochastically(value, torch::kBFloat16, 12, {0, 3001});
  EXPECT_FALSE(whole.parameter.equal(other.parameter));
}

TEST(UpdateKernel, RefusesWhatItCannotUpdate) {
  const Case c = all_cases().front();
  Updated whole_numbers(c, torch::ones({4}, torch::kLong));
  EXPECT_THROW(update(c, whole_numbers, {{torch::ones({4})}}, {}), UsageError);
  Updated wide(c, torch::ones({4}));
  EXPECT_THROW(
      update(c, wide, {{torch::ones({4}, torch::kInt)}}, {}), UsageError);
  wide.master = torch::ones({4});
  EXPECT_THROW(update(c, wide, {{torch::ones({4})}}, {}), UsageError);
}

} // namespace
} // namespace tessera
