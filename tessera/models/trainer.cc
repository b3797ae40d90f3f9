// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/record_impl.h>
#include <tessera/dtensor/build.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/random.h>
#include <tessera/models/llama.h>
#include <tessera/models/trainer.h>
#include <tessera/optim/grad_scaler.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/sharded_optimizer.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// Splits the time since its making, or since the last `lap`, into the
// collectives' and the rest.
class Stopwatch {
 public:
  explicit Stopwatch(const Record& record)
      : record_(record),
        start_(Clock::now()),
        communication_(record.seconds()) {}

  struct Lap {
    double own;
    double communication;
  };

  Lap lap() {
    const auto now = Clock::now();
    const double communication = record_.seconds();
    const double wall = std::chrono::duration<double>(now - start_).count();
    const double blocked = communication - communication_;
    start_ = now;
    communication_ = communication;
    return {wall - blocked, blocked};
  }

 private:
  const Record& record_;
  Clock::time_point start_;
  double communication_;
};

Placements batch_placements(const DeviceMesh& mesh, int64_t axis) {
  Placements placements = replicated(mesh);
  placements[static_cast<size_t>(axis)] = Shard(0);
  return placements;
}

LoaderOptions loader_options(
    const DeviceMesh& mesh, int64_t axis, const TrainerOptions& options) {
  LoaderOptions loader;
  loader.sequence = options.sequence;
  loader.global_batch = options.batch * mesh.size(axis);
  loader.validation_fraction = options.validation_fraction;
  loader.seed = options.seed;
  loader.vocab_size = options.model.vocab_size;
  loader.rank = mesh.coordinate(axis);
  loader.ranks = mesh.size(axis);
  return loader;
}

std::shared_ptr<Llama> build_model(
    const DeviceMesh& mesh, const TrainerOptions& options) {
  if (options.sequence > options.model.max_position_embeddings) {
    throw UsageError(fmt::format(
        "train: sequence length {}, the model's max_position_embeddings is {}; "
        "shorten the sequence or raise it",
        options.sequence,
        options.model.max_position_embeddings));
  }
  manual_seed(mesh.world(), options.seed);
  auto model =
      build(mesh, [&] { return std::make_shared<Llama>(options.model); });
  if (options.dtype != c10::kFloat) {
    model->to(options.dtype);
  }
  return model;
}

template <typename Options>
Options adam_options(const TrainerOptions& options) {
  Options settings(options.schedule.peak);
  settings.betas({0.9, 0.95}).weight_decay(options.weight_decay);
  return settings;
}

template <typename Options>
Options plain_options(const TrainerOptions& options) {
  Options settings(options.schedule.peak);
  settings.weight_decay(options.weight_decay);
  return settings;
}

ShardedOptimizer make_optimizer(
    std::vector<at::Tensor> parameters, const TrainerOptions& options) {
  const auto sharded = [&](torch::optim::Optimizer&& optimizer) {
    return shard_optimizer(
        std::move(optimizer),
        ShardingStage{options.axis, options.stage},
        {.sync = options.sync,
         .bucket_bytes = options.bucket_bytes,
         .overlap = options.overlap,
         .one_pass = options.one_pass});
  };
  switch (options.optimizer) {
    case TrainerOptimizer::kAdamW:
      break;
    case TrainerOptimizer::kAdam:
      return sharded(torch::optim::Adam(
          std::move(parameters),
          adam_options<torch::optim::AdamOptions>(options)));
    case TrainerOptimizer::kSgd:
      return sharded(torch::optim::SGD(
          std::move(parameters),
          plain_options<torch::optim::SGDOptions>(options).momentum(0.9)));
    case TrainerOptimizer::kRmsprop:
      return sharded(torch::optim::RMSprop(
          std::move(parameters),
          plain_options<torch::optim::RMSpropOptions>(options)));
    case TrainerOptimizer::kAdagrad:
      return sharded(torch::optim::Adagrad(
          std::move(parameters),
          plain_options<torch::optim::AdagradOptions>(options)));
    case TrainerOptimizer::kLion:
      return sharded(
          Lion(std::move(parameters), plain_options<LionOptions>(options)));
  }
  return sharded(torch::optim::AdamW(
      std::move(parameters),
      adam_options<torch::optim::AdamWOptions>(options)));
}

} // namespace

struct Trainer::Impl {
  Impl(
      const DeviceMesh& device_mesh,
      const TrainerOptions& trainer_options,
      std::shared_ptr<const TokenFile> file)
      : mesh(device_mesh),
        options(trainer_options),
        axis(mesh.axis_index(options.axis)),
        loader(std::move(file), loader_options(mesh, axis, options)),
        model(build_model(mesh, options)),
        optimizer(make_optimizer(model->parameters(), options)),
        scaler({.enabled = options.dtype == c10::kHalf}) {}

  // The batch as two distributed tensors, cut along the axis.
  Batch distributed(const Batch& local) const {
    const std::vector<int64_t> sizes{
        loader.options().global_batch, options.sequence};
    const Placements placements = batch_placements(mesh, axis);
    return {
        from_local(local.tokens, mesh, placements, sizes),
        from_local(local.targets, mesh, placements, sizes)};
  }

  // Returns the mean loss.
  double backward_passes() {
    double sum = 0;
    for (int64_t pass = 0; pass < options.passes; ++pass) {
      std::optional<AccumulationScope> scope;
      if (pass + 1 < options.passes) {
        scope.emplace(optimizer.accumulate());
      }
      const Batch batch =
          distributed(loader.train(steps_done * options.passes + pass));
      const at::Tensor loss = model->loss(batch.tokens, batch.targets);
      scaler.scale(options.passes > 1 ? loss / options.passes : loss)
          .backward();
      sum += loss.item<double>();
    }
    return sum / static_cast<double>(options.passes);
  }

  void set_learning_rate(double rate) {
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(rate);
    }
  }

  DeviceMesh mesh;
  TrainerOptions options;
  int64_t axis;
  TokenLoader loader;
  std::shared_ptr<Llama> model;
  ShardedOptimizer optimizer;
  GradScaler scaler; // does nothing but with float16
  int64_t steps_done = 0;
};

Trainer::Trainer(
    const DeviceMesh& mesh,
    const TrainerOptions& options,
    std::shared_ptr<const TokenFile> file)
    : impl_(std::make_unique<Impl>(mesh, options, std::move(file))) {}

Trainer::~Trainer() = default;

StepReport Trainer::step() {
  Impl& self = *impl_;
  StepReport report;
  report.learning_rate = self.options.schedule.at(self.steps_done);
  report.tokens = tokens_per_step();
  const auto start = Clock::now();
  const Record& record = self.mesh.world().record();
  const double hidden_before = record.impl().hidden_seconds();
  Stopwatch watch(record);
  self.optimizer.zero_grad();
  report.loss = self.backward_passes();
  const Stopwatch::Lap forward_backward = watch.lap();

  self.set_learning_rate(report.learning_rate);
  report.loss_scale = self.scaler.scale();
  if (self.options.clip > 0) {
    self.scaler.unscale(self.optimizer);
    report.gradient_norm = self.optimizer.clip_grad_norm(self.options.clip);
  }
  report.is_skipped = !self.scaler.step(self.optimizer);
  self.scaler.update();
  const Stopwatch::Lap optimizer = watch.lap();

  report.seconds.forward_backward = forward_backward.own;
  report.seconds.communication =
      forward_backward.communication + optimizer.communication;
  report.seconds.optimizer = optimizer.own;
  report.seconds.hidden =
      std::max(record.impl().hidden_seconds() - hidden_before, 0.0);
  report.seconds.total =
      std::chrono::duration<double>(Clock::now() - start).count();
  report.step = ++self.steps_done;
  return report;
}

double Trainer::validation_loss(int64_t batches) const {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (int64_t i = 0; i < batches; ++i) {
    const Batch batch =
        impl_->distributed(impl_->loader.validation(i, batches));
    sum += impl_->model->loss(batch.tokens, batch.targets).item<double>();
  }
  return sum / static_cast<double>(batches);
}

int64_t Trainer::tokens_per_step() const {
  return impl_->loader.options().global_batch * impl_->options.sequence *
      impl_->options.passes;
}

int64_t Trainer::state_bytes() const {
  const OptimizerMemory memory = impl_->optimizer.memory();
  return memory.state_bytes + memory.master_bytes;
}

const TokenLoader& Trainer::loader() const {
  return impl_->loader;
}

const Llama& Trainer::model() const {
  return *impl_->model;
}

} // namespace tessera
