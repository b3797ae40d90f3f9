// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/optim/lion.h>
#include <tessera/optim/update_kernel.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>

// What each rule does to one element: a value p, its gradient g, and the states
// that the rule keeps. Constants are worked out in float64 and rounded once to
// the type that computes, as torch's operators do with scalars.
namespace tessera::update {

template <typename T>
using States = std::array<T, 3>;

template <typename T>
T root(T value) {
  return std::sqrt(value);
}

// Weight decay as a part of the gradient.
template <typename T>
T with_decay(T g, T p, T weight_decay) {
  return weight_decay == 0 ? g : g + weight_decay * p;
}

// Adam, and AdamW, whose weight decay shrinks the value instead.
template <typename T, bool kAmsgrad>
struct Adam {
  static constexpr int kStates = kAmsgrad ? 3 : 2;

  template <typename Options>
  Adam(const Options& options, int64_t step, bool decoupled)
      : beta1(static_cast<T>(std::get<0>(options.betas()))),
        beta2(static_cast<T>(std::get<1>(options.betas()))),
        new1(static_cast<T>(1 - std::get<0>(options.betas()))),
        new2(static_cast<T>(1 - std::get<1>(options.betas()))),
        eps(static_cast<T>(options.eps())),
        keep(static_cast<T>(
            decoupled ? 1 - options.lr() * options.weight_decay() : 1)),
        weight_decay(static_cast<T>(decoupled ? 0 : options.weight_decay())) {
    const auto [b1, b2] = options.betas();
    const auto count = static_cast<double>(step);
    rate = static_cast<T>(options.lr() / (1 - std::pow(b1, count)));
    correction = static_cast<T>(1 / std::sqrt(1 - std::pow(b2, count)));
  }

  [[gnu::always_inline]] void operator()(T& p, T g, States<T>& state) const {
    p *= keep;
    g = with_decay(g, p, weight_decay);
    T& average = state[0];
    T& square = state[1];
    average = beta1 * average + new1 * g;
    square = beta2 * square + new2 * g * g;
    T largest = square;
    if constexpr (kAmsgrad) {
      largest = state[2] =
          square > state[2] || square != square ? square : state[2];
    }
    p -= rate * average / (root(largest) * correction + eps);
  }

  T beta1, beta2, new1, new2, eps, keep, weight_decay, rate, correction;
};

enum class Momentum { kNone, kPlain, kNesterov };

template <typename T, Momentum kMomentum>
struct Sgd {
  static constexpr int kStates = kMomentum == Momentum::kNone ? 0 : 1;

  // The first step's buffer is the gradient itself.
  Sgd(const torch::optim::SGDOptions& options, int64_t step)
      : rate(static_cast<T>(options.lr())),
        weight_decay(static_cast<T>(options.weight_decay())),
        momentum(static_cast<T>(options.momentum())),
        kept(step == 1 ? T(0) : momentum),
        added(static_cast<T>(step == 1 ? 1 : 1 - options.dampening())) {}

  [[gnu::always_inline]] void operator()(T& p, T g, States<T>& state) const {
    g = with_decay(g, p, weight_decay);
    if constexpr (kMomentum != Momentum::kNone) {
      state[0] = kept * state[0] + added * g;
      g = kMomentum == Momentum::kNesterov ? g + momentum * state[0] : state[0];
    }
    p -= rate * g;
  }

  T rate, weight_decay, momentum, kept, added;
};

// States: square_avg, momentum_buffer if there is momentum, grad_avg if
// centered.
template <typename T, bool kMomentum, bool kCentered>
struct Rmsprop {
  static constexpr int kStates = 1 + (kMomentum ? 1 : 0) + (kCentered ? 1 : 0);

  explicit Rmsprop(const torch::optim::RMSpropOptions& options)
      : rate(static_cast<T>(options.lr())),
        alpha(static_cast<T>(options.alpha())),
        fresh(static_cast<T>(1 - options.alpha())),
        eps(static_cast<T>(options.eps())),
        weight_decay(static_cast<T>(options.weight_decay())),
        momentum(static_cast<T>(options.momentum())) {}

  [[gnu::always_inline]] void operator()(T& p, T g, States<T>& state) const {
    g = with_decay(g, p, weight_decay);
    state[0] = alpha * state[0] + fresh * g * g;
    T variance = state[0];
    if constexpr (kCentered) {
      T& mean = state[kStates - 1];
      mean = alpha * mean + fresh * g;
      variance -= mean * mean;
    }
    T change = g / (root(variance) + eps);
    if constexpr (kMomentum) {
      change = state[1] = momentum * state[1] + change;
    }
    p -= rate * change;
  }

  T rate, alpha, fresh, eps, weight_decay, momentum;
};

template <typename T>
struct Adagrad {
  static constexpr int kStates = 1;

  Adagrad(const torch::optim::AdagradOptions& options, int64_t step)
      : rate(static_cast<T>(
            options.lr() /
            (1 + static_cast<double>(step - 1) * options.lr_decay()))),
        eps(static_cast<T>(options.eps())),
        weight_decay(static_cast<T>(options.weight_decay())) {}

  [[gnu::always_inline]] void operator()(T& p, T g, States<T>& state) const {
    g = with_decay(g, p, weight_decay);
    state[0] += g * g;
    p -= rate * g / (root(state[0]) + eps);
  }

  T rate, eps, weight_decay;
};

template <typename T>
struct Lion {
  static constexpr int kStates = 1;

  explicit Lion(const LionOptions& options)
      : beta1(static_cast<T>(std::get<0>(options.betas()))),
        beta2(static_cast<T>(std::get<1>(options.betas()))),
        new1(static_cast<T>(1 - std::get<0>(options.betas()))),
        new2(static_cast<T>(1 - std::get<1>(options.betas()))),
        rate(static_cast<T>(options.lr())),
        keep(static_cast<T>(1 - options.lr() * options.weight_decay())) {}

  [[gnu::always_inline]] void operator()(T& p, T g, States<T>& state) const {
    const T direction = beta1 * state[0] + new1 * g;
    p *= keep;
    p -= direction > 0 ? rate : direction < 0 ? -rate : T(0);
    state[0] = beta2 * state[0] + new2 * g;
  }

  T beta1, beta2, new1, new2, rate, keep;
};

template <typename T, typename Options, typename Function>
void with_adam(
    const Options& options, int64_t step, bool decoupled, Function&& function) {
  if (options.amsgrad()) {
    function(Adam<T, true>(options, step, decoupled));
  } else {
    function(Adam<T, false>(options, step, decoupled));
  }
}

template <typename T, typename Function>
void with_sgd(
    const torch::optim::SGDOptions& options,
    int64_t step,
    Function&& function) {
  if (options.momentum() == 0) {
    function(Sgd<T, Momentum::kNone>(options, step));
  } else if (options.nesterov()) {
    function(Sgd<T, Momentum::kNesterov>(options, step));
  } else {
    function(Sgd<T, Momentum::kPlain>(options, step));
  }
}

template <typename T, typename Function>
void with_rmsprop(
    const torch::optim::RMSpropOptions& options, Function&& function) {
  const bool momentum = options.momentum() > 0;
  if (momentum && options.centered()) {
    function(Rmsprop<T, true, true>(options));
  } else if (momentum) {
    function(Rmsprop<T, true, false>(options));
  } else if (options.centered()) {
    function(Rmsprop<T, false, true>(options));
  } else {
    function(Rmsprop<T, false, false>(options));
  }
}

// Calls `function` with the functor of the rule under these options.
template <typename T, typename Function>
void with_functor(
    UpdateRule rule,
    const ParamOptions& options,
    int64_t step,
    Function&& function) {
  switch (rule) {
    case UpdateRule::kAdamW:
      return with_adam<T>(
          static_cast<const torch::optim::AdamWOptions&>(options),
          step,
          true,
          function);
    case UpdateRule::kAdam:
      return with_adam<T>(
          static_cast<const torch::optim::AdamOptions&>(options),
          step,
          false,
          function);
    case UpdateRule::kSgd:
      return with_sgd<T>(
          static_cast<const torch::optim::SGDOptions&>(options),
          step,
          function);
    case UpdateRule::kRmsprop:
      return with_rmsprop<T>(
          static_cast<const torch::optim::RMSpropOptions&>(options), function);
    case UpdateRule::kAdagrad:
      return function(Adagrad<T>(
          static_cast<const torch::optim::AdagradOptions&>(options), step));
    case UpdateRule::kLion:
      return function(Lion<T>(static_cast<const LionOptions&>(options)));
  }
}

} // namespace tessera::update
