// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/update_rule.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <typeinfo>

namespace tessera {
namespace {

using torch::optim::Optimizer;

// One tensor of a rule's state, and when and how it is there.
template <typename Options, typename State>
struct Field {
  const char* name;
  at::Tensor& (State::*tensor)() noexcept;
  bool (*needed)(const Options&);
  double (*initial)(const Options&) = [](const Options&) { return 0.0; };
};

template <typename Options>
bool always(const Options& /*options*/) {
  return true;
}

// What a rule is made of: its optimizer, options, state, and the state's
// fields in torch's order.
template <typename OptimizerType, typename OptionsType, typename StateType>
struct AdamLike {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
  static constexpr Field<Options, State> kFields[] = {
      {"exp_avg", &State::exp_avg, always<Options>},
      {"exp_avg_sq", &State::exp_avg_sq, always<Options>},
      {"max_exp_avg_sq", &State::max_exp_avg_sq, [](const Options& options) {
         return options.amsgrad();
       }}};
};

using AdamW = AdamLike<
    torch::optim::AdamW,
    torch::optim::AdamWOptions,
    torch::optim::AdamWParamState>;
using Adam = AdamLike<
    torch::optim::Adam,
    torch::optim::AdamOptions,
    torch::optim::AdamParamState>;

struct Sgd {
  using Optimizer = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr Field<Options, State> kFields[] = {
      {"momentum_buffer", &State::momentum_buffer, [](const Options& options) {
         return options.momentum() != 0;
       }}};
};

struct Rmsprop {
  using Optimizer = torch::optim::RMSprop;
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static constexpr Field<Options, State> kFields[] = {
      {"square_avg", &State::square_avg, always<Options>},
      {"momentum_buffer",
       &State::momentum_buffer,
       [](const Options& options) { return options.momentum() > 0; }},
      {"grad_avg", &State::grad_avg, [](const Options& options) {
         return options.centered();
       }}};
};

struct Adagrad {
  using Optimizer = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr Field<Options, State> kFields[] = {
      {"sum", &State::sum, always<Options>, [](const Options& options) {
         return options.initial_accumulator_value();
       }}};
};

struct LionRule {
  using Optimizer = Lion;
  using Options = LionOptions;
  using State = LionParamState;
  static constexpr Field<Options, State> kFields[] = {
      {"exp_avg", &State::exp_avg, always<Options>}};
};

template <typename Function>
auto with_rule(UpdateRule rule, Function&& function) {
  switch (rule) {
    case UpdateRule::kAdamW:
      return function(AdamW());
    case UpdateRule::kAdam:
      return function(Adam());
    case UpdateRule::kSgd:
      return function(Sgd());
    case UpdateRule::kRmsprop:
      return function(Rmsprop());
    case UpdateRule::kAdagrad:
      return function(Adagrad());
    case UpdateRule::kLion:
      break;
  }
  return function(LionRule());
}

constexpr UpdateRule kRules[] = {
    UpdateRule::kAdamW,
    UpdateRule::kAdam,
    UpdateRule::kSgd,
    UpdateRule::kRmsprop,
    UpdateRule::kAdagrad,
    UpdateRule::kLion};

} // namespace

UpdateRule update_rule_of(const Optimizer& optimizer) {
  for (const UpdateRule rule : kRules) {
    const bool is = with_rule(rule, [&]<typename Rule>(Rule) {
      return dynamic_cast<const typename Rule::Optimizer*>(&optimizer) !=
          nullptr;
    });
    if (is) {
      return rule;
    }
  }
  throw UsageError(fmt::format(
      "shard_optimizer: got {}, whose update is not sharded yet; expected "
      "torch::optim::AdamW, Adam, SGD, RMSprop or Adagrad, or tessera::Lion; "
      "take one of those, or step this one as it is, with its whole state on "
      "every rank",
      c10::demangle(typeid(optimizer).name())));
}

bool has_stepped(const Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer) == nullptr) {
    return !optimizer.state().empty();
  }
  return std::ranges::any_of(optimizer.state(), [](const auto& entry) {
    return static_cast<const Adagrad::State&>(*entry.second).step() > 0;
  });
}

std::vector<StateField> state_fields(
    UpdateRule rule, const ParamOptions& options) {
  return with_rule(rule, [&]<typename Rule>(Rule) {
    const auto& typed = static_cast<const typename Rule::Options&>(options);
    std::vector<StateField> fields;
    for (const auto& field : Rule::kFields) {
      if (field.needed(typed)) {
        fields.push_back({field.name, field.initial(typed)});
      }
    }
    return fields;
  });
}

std::unique_ptr<ParamState> make_state(
    UpdateRule rule,
    const ParamOptions& options,
    const std::function<at::Tensor()>& zeros) {
  return with_rule(
      rule, [&]<typename Rule>(Rule) -> std::unique_ptr<ParamState> {
        const auto& typed = static_cast<const typename Rule::Options&>(options);
        auto state = std::make_unique<typename Rule::State>();
        for (const auto& field : Rule::kFields) {
          if (field.needed(typed)) {
            at::Tensor& tensor = ((*state).*field.tensor)() = zeros();
            if (field.initial(typed) != 0) {
              tensor.fill_(field.initial(typed));
            }
          }
        }
        return state;
      });
}

std::vector<at::Tensor> tensors_of(UpdateRule rule, ParamState& state) {
  return with_rule(rule, [&]<typename Rule>(Rule) {
    auto& typed = static_cast<typename Rule::State&>(state);
    std::vector<at::Tensor> tensors;
    for (const auto& field : Rule::kFields) {
      if (const at::Tensor& tensor = (typed.*field.tensor)();
          tensor.defined()) {
        tensors.push_back(tensor);
      }
    }
    return tensors;
  });
}

int64_t advance(UpdateRule rule, ParamState& state) {
  return with_rule(rule, [&]<typename Rule>(Rule) -> int64_t {
    auto& typed = static_cast<typename Rule::State&>(state);
    if constexpr (requires { ++typed.step(); }) {
      return ++typed.step();
    } else {
      return 0;
    }
  });
}

void set_steps(UpdateRule rule, ParamState& state, int64_t steps) {
  with_rule(rule, [&]<typename Rule>(Rule) {
    auto& typed = static_cast<typename Rule::State&>(state);
    if constexpr (requires { typed.step(steps); }) {
      typed.step(steps);
    }
  });
}

} // namespace tessera
