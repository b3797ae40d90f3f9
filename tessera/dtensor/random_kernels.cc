// SPDX-License-Identifier: Apache-2.0
#include <tessera/dtensor/random_kernels.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/lt.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/dtensor/philox.h>
#include <tessera/dtensor/random_stream.h>

#include <cmath>
#include <mutex>
#include <numbers>
#include <unordered_map>

namespace tessera {
namespace {

// Calls f(global index of the first element, position in the contiguous local,
// count) for each row of the local tensor.
template <typename F>
void for_each_row(SpecPtr spec, F f) {
  const auto dims = static_cast<size_t>(spec->dim());
  int64_t numel = 1;
  for (int64_t size : spec->local_sizes) {
    numel *= size;
  }
  if (numel == 0) {
    return;
  }
  const int64_t row = dims == 0 ? 1 : spec->local_sizes[dims - 1];
  std::vector<int64_t> index(dims, 0);
  for (int64_t position = 0; position < numel; position += row) {
    int64_t global = 0;
    for (size_t d = 0; d < dims; ++d) {
      global = global * spec->sizes[d] + spec->local_offsets[d] + index[d];
    }
    f(global, position, row);
    for (size_t d = dims; d-- > 1;) { // the last dim is the row itself
      if (++index[d - 1] < spec->local_sizes[d - 1]) {
        break;
      }
      index[d - 1] = 0;
    }
  }
}

float unit_float(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

double unit_double(uint32_t high, uint32_t low) {
  return static_cast<double>((static_cast<uint64_t>(high) << 32 | low) >> 11) *
      0x1p-53;
}

// Four neighbours share one block of the generator.
void uniform_row(
    const Philox& philox, int64_t global, float* out, int64_t count) {
  int64_t i = 0;
  while (i < count) {
    const auto index = static_cast<uint64_t>(global + i);
    const std::array<uint32_t, 4> block = philox(index >> 2);
    for (uint64_t lane = index & 3; lane < 4 && i < count; ++lane, ++i) {
      out[i] = unit_float(block[lane]);
    }
  }
}

void uniform_row(
    const Philox& philox, int64_t global, double* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const std::array<uint32_t, 4> block =
        philox(static_cast<uint64_t>(global + i));
    out[i] = unit_double(block[0], block[1]);
  }
}

// Box and Muller's transform; one block an element.
template <typename T>
void normal_row(const Philox& philox, int64_t global, T* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const std::array<uint32_t, 4> block =
        philox(static_cast<uint64_t>(global + i));
    const double radius =
        std::sqrt(-2.0 * std::log(1.0 - unit_double(block[0], block[1])));
    out[i] = static_cast<T>(
        radius *
        std::cos(2.0 * std::numbers::pi * unit_double(block[2], block[3])));
  }
}

void random_bits_row(
    const Philox& philox, int64_t global, int64_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const std::array<uint32_t, 4> block =
        philox(static_cast<uint64_t>(global + i));
    out[i] = static_cast<int64_t>(
        (static_cast<uint64_t>(block[0]) << 32 | block[1]) >> 1);
  }
}

enum class Source : uint8_t { kUniform, kNormal };

// Random numbers for the local part, contiguous; float64 for a float64 target,
// float32 for all others.
at::Tensor numbers(
    Source kind, SpecPtr spec, at::ScalarType dtype, const RandomState& draw) {
  const Philox philox(draw.seed, draw.scope, draw.count);
  const bool wide = dtype == at::kDouble;
  at::Tensor out = at::empty(
      spec->local_sizes, at::TensorOptions(wide ? at::kDouble : at::kFloat));
  auto fill = [&](auto* data) {
    for_each_row(spec, [&](int64_t global, int64_t position, int64_t count) {
      kind == Source::kUniform
          ? uniform_row(philox, global, data + position, count)
          : normal_row(philox, global, data + position, count);
    });
  };
  wide ? fill(out.mutable_data_ptr<double>())
       : fill(out.mutable_data_ptr<float>());
  return out.to(spec->mesh.device());
}

at::Tensor random_bits(SpecPtr spec, const RandomState& draw) {
  const Philox philox(draw.seed, draw.scope, draw.count);
  at::Tensor out = at::empty(spec->local_sizes, at::TensorOptions(at::kLong));
  auto* data = out.mutable_data_ptr<int64_t>();
  for_each_row(spec, [&](int64_t global, int64_t position, int64_t count) {
    random_bits_row(philox, global, data + position, count);
  });
  return out.to(spec->mesh.device());
}

// One call of a random operator: its arguments by position, this rank's part,
// and the draw that it is.
class RandomCall {
 public:
  RandomCall(const LocalCall& call, torch::jit::Stack& stack)
      : call_(call),
        stack_(stack),
        spec_(call.plan.decision.inputs.at(0)),
        draw_(draw(call.plan.mesh.world())) {}

  at::Tensor self() const {
    return value(0).toTensor();
  }
  double real(size_t position, double fallback) const {
    return value(position).isNone() ? fallback
                                    : value(position).toScalar().toDouble();
  }
  const c10::IValue& value(size_t position) const {
    return stack_[stack_.size() - call_.info.args.size() + position];
  }
  at::Tensor uniform(at::ScalarType dtype) const {
    return numbers(Source::kUniform, spec_, dtype, draw_);
  }
  at::Tensor normal(at::ScalarType dtype) const {
    return numbers(Source::kNormal, spec_, dtype, draw_);
  }
  at::Tensor bits() const {
    return random_bits(spec_, draw_);
  }
  at::ScalarType dtype_argument(size_t position) const {
    return value(position).isNone() ? self().scalar_type()
                                    : value(position).toScalarType();
  }

  void result(at::Tensor tensor) {
    torch::jit::drop(stack_, call_.info.args.size());
    stack_.emplace_back(std::move(tensor));
  }
  void result_self(const at::Tensor& source) {
    at::Tensor target = self();
    target.copy_(source);
    result(target);
  }
  void results(at::Tensor first, at::Tensor second) {
    result(std::move(first));
    stack_.emplace_back(std::move(second));
  }

 private:
  const LocalCall& call_;
  torch::jit::Stack& stack_;
  SpecPtr spec_;
  RandomState draw_;
};

using Kernel = void (*)(RandomCall&);

void native_dropout(RandomCall& call) {
  const at::Tensor input = call.self();
  const double p = call.real(1, 0.5);
  const bool train = call.value(2).isNone() || call.value(2).toBool();
  const at::Tensor kept = train
      ? call.uniform(at::kFloat).ge_(p).to(at::kBool)
      : at::empty(input.sizes(), input.options().dtype(at::kBool)).fill_(true);
  at::Tensor output = train
      ? input.mul(kept).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p))
      : input.clone();
  call.results(std::move(output), kept);
}

void bernoulli_inplace(RandomCall& call) {
  const c10::IValue& p = call.value(1);
  const at::Tensor uniform = call.uniform(at::kDouble);
  call.result_self(
      p.isTensor() ? uniform.lt(p.toTensor())
                   : uniform.lt(p.isNone() ? 0.5 : p.toScalar().toDouble()));
}

void bernoulli_of_probabilities(RandomCall& call) {
  const at::Tensor self = call.self();
  call.result(call.uniform(at::kDouble).lt(self).to(self.scalar_type()));
}

void bernoulli_p(RandomCall& call) {
  call.result(call.uniform(at::kDouble)
                  .lt(call.real(1, 0.5))
                  .to(call.self().scalar_type()));
}

void uniform_inplace(RandomCall& call) {
  const double from = call.real(1, 0);
  const double to = call.real(2, 1);
  call.result_self(
      call.uniform(call.self().scalar_type()).mul_(to - from).add_(from));
}

void normal_inplace(RandomCall& call) {
  call.result_self(call.normal(call.self().scalar_type())
                       .mul_(call.real(2, 1))
                       .add_(call.real(1, 0)));
}

void log_normal_inplace(RandomCall& call) {
  call.result_self(call.normal(call.self().scalar_type())
                       .mul_(call.real(2, 2))
                       .add_(call.real(1, 1))
                       .exp_());
}

void exponential_inplace(RandomCall& call) {
  call.result_self(call.uniform(call.self().scalar_type())
                       .neg_()
                       .log1p_()
                       .div_(-call.real(1, 1)));
}

void rand_like(RandomCall& call) {
  const at::ScalarType dtype = call.dtype_argument(1);
  call.result(call.uniform(dtype).to(dtype));
}

void randn_like(RandomCall& call) {
  const at::ScalarType dtype = call.dtype_argument(1);
  call.result(call.normal(dtype).to(dtype));
}

at::Tensor integers(const RandomCall& call, int64_t low, int64_t high) {
  if (high <= low) {
    throw UsageError(fmt::format(
        "random integers: the range [{}, {}) is empty; the upper bound must "
        "exceed the lower",
        low,
        high));
  }
  return call.bits().remainder_(high - low).add_(low);
}

void random_from_to(RandomCall& call) {
  const bool open = call.value(2).isNone();
  call.result_self(integers(
      call,
      call.value(1).toInt(),
      open ? (int64_t{1} << 24) : call.value(2).toInt()));
}

void random_to(RandomCall& call) {
  call.result_self(integers(call, 0, call.value(1).toInt()));
}

// The whole range that the dtype holds exactly.
void random_plain(RandomCall& call) {
  const at::ScalarType dtype = call.self().scalar_type();
  const int64_t bits = dtype == at::kBool ? 1
      : dtype == at::kByte                ? 8
      : dtype == at::kChar                ? 7
      : dtype == at::kShort               ? 15
      : dtype == at::kInt                 ? 31
      : dtype == at::kFloat               ? 24
      : dtype == at::kDouble              ? 53
      : dtype == at::kHalf                ? 11
      : dtype == at::kBFloat16            ? 8
                                          : 62;
  call.result_self(integers(call, 0, int64_t{1} << bits));
}

void randint_like(RandomCall& call) {
  call.result(
      integers(call, 0, call.value(1).toInt()).to(call.dtype_argument(2)));
}

void randint_like_low(RandomCall& call) {
  call.result(integers(call, call.value(1).toInt(), call.value(2).toInt())
                  .to(call.dtype_argument(3)));
}

const std::unordered_map<std::string, Kernel>& kernels() {
  static const std::unordered_map<std::string, Kernel> table = {
      {"aten::native_dropout", native_dropout},
      {"aten::bernoulli", bernoulli_of_probabilities},
      {"aten::bernoulli.p", bernoulli_p},
      {"aten::bernoulli_.float", bernoulli_inplace},
      {"aten::bernoulli_.Tensor", bernoulli_inplace},
      {"aten::uniform_", uniform_inplace},
      {"aten::normal_", normal_inplace},
      {"aten::log_normal_", log_normal_inplace},
      {"aten::exponential_", exponential_inplace},
      {"aten::rand_like", rand_like},
      {"aten::randn_like", randn_like},
      {"aten::randint_like", randint_like},
      {"aten::randint_like.low_dtype", randint_like_low},
      {"aten::random_", random_plain},
      {"aten::random_.to", random_to},
      {"aten::random_.from", random_from_to},
  };
  return table;
}

} // namespace

bool has_random_kernel(const std::string& op) {
  return kernels().count(op) != 0;
}

void run_random(const LocalCall& call, torch::jit::Stack& stack) {
  const auto found = kernels().find(call.info.name);
  if (found == kernels().end()) {
    throw Error(fmt::format(
        "{}: its rule asks for counter-based random numbers, but there is no "
        "kernel for it",
        call.info.name));
  }
  RandomCall random(call, stack);
  found->second(random);
}

namespace {

at::Generator fresh_generator(c10::Device device, uint64_t seed) {
  if (device.is_cpu()) {
    return at::make_generator<at::CPUGeneratorImpl>(seed);
  }
  at::Generator generator = at::globalContext()
                                .getAcceleratorHooksInterface(device.type())
                                .getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

} // namespace

void run_seeded(const LocalCall& call, torch::jit::Stack& stack) {
  const RandomState state = draw(call.plan.mesh.world());
  const uint64_t seed = Philox(state.seed, state.scope, state.count).seed();
  const c10::Device device = call.plan.mesh.device();
  if (call.info.generator_arg >= 0) {
    const size_t first = stack.size() - call.info.args.size();
    stack[first + static_cast<size_t>(call.info.generator_arg)] =
        fresh_generator(device, seed);
    call.op.redispatchBoxed(call.keys, &stack);
    return;
  }
  // It takes libtorch's own generator, which the process's ranks share.
  static std::mutex one_rank_at_a_time;
  std::lock_guard<std::mutex> lock(one_rank_at_a_time);
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const at::Tensor before = generator.get_state();
  generator.set_current_seed(seed);
  call.op.redispatchBoxed(call.keys, &stack);
  generator.set_state(before);
}

} // namespace tessera
