// SPDX-License-Identifier: Apache-2.0
//
// A range is walked in blocks that stay in the first-level cache. Whatever is
// not of the type that computes is converted into scratch space first and
// back afterwards; the rest is worked on where it lies. A range of which
// nothing needs scratch space is one block: that is the usual case, parameter,
// gradient and states all float32.
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/reduce_kernels.h>
#include <tessera/optim/block_convert.h>
#include <tessera/optim/parallel_parts.h>
#include <tessera/optim/update_functors.h>
#include <tessera/optim/update_kernel.h>
#include <tessera/optim/vector_call.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

namespace tessera {
namespace {

constexpr int64_t kBlock = 2048;
// Ranges whose copies are larger than this go past the caches.
constexpr int64_t kStreamedBytes = int64_t{1} << 20;

// One block, all of the type that computes.
template <typename T>
struct Operands {
  T* value;
  const T* gradient;
  std::array<T*, 3> states;
};

template <typename T, typename Functor>
struct UpdateLoop {
  Functor rule;
  T scale;

  [[gnu::always_inline]] void operator()(
      const Operands<T>& operands, int64_t count) const {
    const Functor step = rule;
    const T factor = scale;
    T* value = operands.value;
    const T* gradient = operands.gradient;
    const std::array<T*, 3> states = operands.states;
    TESSERA_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      update::States<T> state{};
      for (std::size_t s = 0; s < std::size_t{Functor::kStates}; ++s) {
        state[s] = states[s][i];
      }
      T p = value[i];
      step(p, gradient[i] * factor, state);
      value[i] = p;
      for (std::size_t s = 0; s < std::size_t{Functor::kStates}; ++s) {
        states[s][i] = state[s];
      }
    }
  }
};

// Scales gradients and cuts them, NaN staying NaN.
template <typename T>
struct ScaleAndCut {
  T factor;
  T limit;

  [[gnu::always_inline]] void operator()(
      const T* from, T* to, int64_t count) const {
    TESSERA_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const T scaled = from[i] * factor;
      to[i] = scaled < -limit ? -limit : scaled > limit ? limit : scaled;
    }
  }
};

bool is_limited(const UpdateStep& step) {
  return std::isfinite(step.gradient_limit);
}

template <typename T>
using Update = c10::function_ref<void(const Operands<T>&, int64_t)>;

std::byte* at(void* base, int64_t element, c10::ScalarType dtype) {
  return static_cast<std::byte*>(base) +
      element * static_cast<int64_t>(c10::elementSize(dtype));
}

const std::byte* at(const void* base, int64_t element, c10::ScalarType dtype) {
  return static_cast<const std::byte*>(base) +
      element * static_cast<int64_t>(c10::elementSize(dtype));
}

// One thread's walk over its part of a range.
template <typename T>
class Walk {
 public:
  Walk(
      const UpdateRange& range,
      const UpdateStep& step,
      std::size_t states,
      Update<T> update)
      : range_(range),
        step_(step),
        states_(states),
        update_(update),
        value_type_(
            range.master == nullptr ? range.parameter_type : c10::kFloat),
        state_type_(range.state_type.value_or(value_type_)),
        value_(range.master == nullptr ? range.parameter : range.master),
        store_(
            static_cast<int64_t>(c10::elementSize(range.parameter_type)) *
                        range.numel >=
                    kStreamedBytes
                ? Store::kStreamed
                : Store::kCached) {}

  void run(int64_t begin, int64_t end) {
    const bool in_place = value_type_ == kType && state_type_ == kType &&
        range_.gradient_type == kType && range_.master == nullptr &&
        range_.gradients.size() == 1 && range_.copies.empty() &&
        !is_limited(step_);
    const int64_t length = in_place ? end - begin : kBlock;
    for (; begin < end; begin += length) {
      block(begin, std::min(length, end - begin));
    }
  }

 private:
  static constexpr c10::ScalarType kType = c10::CppTypeToScalarType<T>::value;
  using Scratch = std::array<T, kBlock>;

  static T* loaded(
      void* base,
      c10::ScalarType type,
      int64_t begin,
      int64_t count,
      Scratch& scratch) {
    if (type == kType) {
      return static_cast<T*>(base) + begin;
    }
    widen(type, at(base, begin, type), scratch.data(), count);
    return scratch.data();
  }

  const T* gradient(int64_t begin, int64_t count) {
    const T* gradient = summed_gradient(begin, count);
    if (!is_limited(step_)) {
      return gradient;
    }
    const ScaleAndCut<T> cut{
        static_cast<T>(step_.gradient_scale),
        static_cast<T>(step_.gradient_limit)};
    vector_call(cut, gradient, gradient_.data(), count);
    return gradient_.data();
  }

  const T* summed_gradient(int64_t begin, int64_t count) {
    const c10::ScalarType type = range_.gradient_type;
    const std::byte* source = at(range_.gradients[0], begin, type);
    if (range_.gradients.size() > 1) {
      sources_.clear();
      for (const void* base : range_.gradients) {
        sources_.push_back(at(base, begin, type));
      }
      const ReduceOp op = range_.average ? ReduceOp::kAvg : ReduceOp::kSum;
      reduce_in_order(type, op, sources_, sum_.data(), count);
      source = sum_.data();
    }
    if (type == kType) {
      return reinterpret_cast<const T*>(source);
    }
    widen(type, source, gradient_.data(), count);
    return gradient_.data();
  }

  void block(int64_t begin, int64_t count) {
    Operands<T> operands{
        loaded(value_, value_type_, begin, count, scratch_[3]),
        gradient(begin, count),
        {}};
    for (size_t s = 0; s < states_; ++s) {
      operands.states[s] =
          loaded(range_.states[s], state_type_, begin, count, scratch_[s]);
    }
    update_(operands, count);
    if (state_type_ != kType) {
      for (size_t s = 0; s < states_; ++s) {
        narrow_nearest(
            state_type_,
            operands.states[s],
            at(range_.states[s], begin, state_type_),
            count);
      }
    }
    write_parameter(operands.value, begin, count);
  }

  void write_parameter(const T* value, int64_t begin, int64_t count) {
    const c10::ScalarType type = range_.parameter_type;
    std::byte* parameter = at(range_.parameter, begin, type);
    if (type != kType) {
      round(value, parameter, begin, count);
    }
    const auto bytes = count * static_cast<int64_t>(c10::elementSize(type));
    for (void* copy : range_.copies) {
      copy_bytes(at(copy, begin, type), parameter, bytes, store_);
    }
  }

  void round(const T* value, std::byte* out, int64_t begin, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      if (step_.rounding_seed) {
        narrow_stochastic(
            range_.parameter_type,
            value,
            out,
            count,
            *step_.rounding_seed,
            static_cast<uint64_t>(step_.step),
            range_.first_element + begin);
        return;
      }
    }
    narrow_nearest(range_.parameter_type, value, out, count);
  }

  const UpdateRange& range_;
  const UpdateStep& step_;
  size_t states_;
  Update<T> update_;
  c10::ScalarType value_type_;
  c10::ScalarType state_type_;
  void* value_;
  Store store_;
  std::vector<const std::byte*> sources_;
  alignas(64) std::array<Scratch, 4> scratch_;
  alignas(64) Scratch gradient_;
  alignas(64) std::array<std::byte, kBlock * sizeof(double)> sum_;
};

template <typename T>
void update_range(
    UpdateRule rule,
    const ParamOptions& options,
    const UpdateStep& step,
    const UpdateRange& range) {
  update::with_functor<T>(
      rule, options, step.step, [&]<typename Functor>(const Functor& functor) {
        const UpdateLoop<T, Functor> loop{
            functor,
            static_cast<T>(is_limited(step) ? 1 : step.gradient_scale)};
        const auto update = [&](const Operands<T>& operands, int64_t count) {
          vector_call(loop, operands, count);
        };
        for_each_part(
            range.parameter, range.numel, [&](int64_t begin, int64_t end) {
              Walk<T>(range, step, Functor::kStates, update).run(begin, end);
            });
      });
}

bool is_wide(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble;
}

void require_valid(const UpdateRange& range) {
  if (range.master != nullptr && is_wide(range.parameter_type)) {
    throw UsageError(fmt::format(
        "optimizer update: got float32 masters beside {} parameters, expected "
        "bfloat16 or float16; leave the masters out",
        c10::toString(range.parameter_type)));
  }
  if (range.gradients.empty()) {
    throw UsageError(
        "optimizer update: got no gradient, expected one or each rank's; skip "
        "parameters without");
  }
}

} // namespace

void run_update(
    UpdateRule rule,
    const ParamOptions& options,
    const UpdateStep& step,
    const UpdateRange& range) {
  require_valid(range);
  if (range.numel == 0) {
    return;
  }
  if (range.parameter_type == c10::kDouble) {
    update_range<double>(rule, options, step, range);
  } else {
    update_range<float>(rule, options, step, range);
  }
}

} // namespace tessera
