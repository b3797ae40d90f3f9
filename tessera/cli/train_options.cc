// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/error.h>
#include <tessera/cli/mesh_option.h>
#include <tessera/cli/number_option.h>
#include <tessera/cli/sync_modes.h>
#include <tessera/cli/train_options.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <fstream>
#include <string>

namespace tessera::cli {
namespace {

constexpr int64_t kDefaultSteps = 250;
constexpr int64_t kDefaultCompareSteps = 35;
constexpr const char* kBatchAxis = "dp";

struct NamedDtype {
  const char* name;
  c10::ScalarType dtype;
};
constexpr std::array<NamedDtype, 3> kDtypes = {
    {{"float32", c10::kFloat},
     {"bfloat16", c10::kBFloat16},
     {"float16", c10::kHalf}}};

struct NamedOptimizer {
  const char* name;
  TrainerOptimizer optimizer;
};
constexpr std::array<NamedOptimizer, 6> kOptimizers = {
    {{"adamw", TrainerOptimizer::kAdamW},
     {"adam", TrainerOptimizer::kAdam},
     {"sgd", TrainerOptimizer::kSgd},
     {"rmsprop", TrainerOptimizer::kRmsprop},
     {"adagrad", TrainerOptimizer::kAdagrad},
     {"lion", TrainerOptimizer::kLion}}};

template <typename Named>
std::vector<std::string> names_of(const Named& entries) {
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const auto& entry : entries) {
    names.emplace_back(entry.name);
  }
  return names;
}

// Parsing has checked the name.
template <typename Named>
const auto& entry_of(const Named& entries, const std::string& name) {
  return *std::ranges::find_if(
      entries, [&](const auto& entry) { return name == entry.name; });
}

// An option that counts something; a value of 0 is filled in later, so that it
// is no default to show.
void add_count(
    CLI::App& app,
    const char* name,
    int64_t& value,
    const std::string& description) {
  CLI::Option* const option =
      app.add_option(name, value, description)->check(whole_number(1));
  if (value != 0) {
    option->capture_default_str();
  }
}

void add_number(
    CLI::App& app,
    const char* name,
    double& value,
    const CLI::Validator& allowed,
    const char* description) {
  app.add_option(name, value, description)
      ->check(allowed)
      ->capture_default_str();
}

void add_choice(
    CLI::App& app,
    const char* name,
    std::string& value,
    const std::vector<std::string>& choices,
    const char* description) {
  app.add_option(name, value, description)
      ->check(CLI::IsMember(choices))
      ->capture_default_str();
}

void declare_model_options(CLI::App& app, TrainOptions& options) {
  app.add_option(
         "--data,--text",
         options.data,
         "Text file (its bytes are the tokens), or a .bin of uint16 tokens")
      ->required();
  app.add_option(
         "--model",
         options.model,
         fmt::format(
             "Preset ({}) or a JSON file with Hugging Face's field names",
             fmt::join(llama_presets(), ", ")))
      ->capture_default_str();
  add_choice(
      app,
      "--dtype",
      options.dtype,
      names_of(kDtypes),
      "Of weights and activations; updates are float32's, and float16 scales "
      "its loss");
  add_count(app, "--batch", options.batch, "Rows per rank and step");
  add_count(app, "--seq", options.sequence, "Tokens per row");
  add_number(
      app,
      "--val-fraction",
      options.validation_fraction,
      part_of_one(),
      "Part of the file kept for validation: its end");
  add_count(
      app,
      "--val-every",
      options.validation_every,
      "Steps between validations [a tenth of --steps]");
  add_count(
      app,
      "--val-batches",
      options.validation_batches,
      "Batches per validation");
}

void declare_schedule_options(CLI::App& app, TrainOptions& options) {
  add_count(
      app,
      "--steps",
      options.steps,
      fmt::format(
          "Optimizer steps [{}; {} with --compare]",
          kDefaultSteps,
          kDefaultCompareSteps));
  add_number(
      app,
      "--lr",
      options.learning_rate,
      number_above_zero(),
      "Peak learning rate");
  app.add_option(
         "--warmup",
         options.warmup,
         "Steps of linear warm-up, before half a cosine [a twentieth of "
         "--steps]")
      ->check(whole_number(0));
  add_number(
      app,
      "--weight-decay",
      options.weight_decay,
      number_from_zero(),
      "Of the optimizer");
  add_choice(
      app,
      "--optimizer",
      options.optimizer,
      names_of(kOptimizers),
      "What updates the weights; sgd has momentum 0.9");
  add_number(
      app,
      "--clip",
      options.clip,
      number_from_zero(),
      "Largest global norm of the gradients; 0: no clipping");
  app.add_option("--seed", options.seed, "Of weights and of the data's order")
      ->check(whole_number(0))
      ->capture_default_str();
}

void declare_world_options(CLI::App& app, TrainOptions& options) {
  add_count(
      app,
      "--ranks",
      options.ranks,
      "Ranks to start on this machine, when no launcher did [those of --mesh, "
      "else 1]");
  app.add_option(
      "--mesh",
      options.mesh,
      "Axes and sizes, as in dp=2; one size may be -1: the rest of the ranks "
      "[dp=-1]");
  add_choice(
      app,
      "--backend",
      options.backend,
      {"auto", "shm", "gloo"},
      "Of the collectives");
  std::vector<std::string> choices = sync_options();
  choices.insert(choices.begin(), "default");
  add_choice(
      app, "--sync", options.sync, choices, "How gradients are synchronised");
  add_count(
      app,
      "--bucket-mb",
      options.bucket_mb,
      "MiB of parameters in one flat buffer of --sync bucketed, at most");
  app.add_option(
         "--zero",
         options.stage,
         "Stage of ZeRO: 1 cuts the optimizer's states, 2 gradients too")
      ->check(whole_number(1, 2))
      ->capture_default_str();
  add_count(
      app,
      "--grad-accum",
      options.passes,
      "Backward passes per step, each with a batch of its own");
  app.add_flag(
      "--one-pass",
      options.one_pass,
      "Over shm and with --clip 0: reduce, update and gather in one pass");
  app.add_flag(
      "--overlap",
      options.overlap,
      "Begin to reduce a flat buffer during backward");
}

int64_t world_of(
    const TrainOptions& options,
    const std::vector<Axis>& axes,
    std::optional<int64_t> world_size) {
  if (world_size) {
    if (options.ranks != 0 && options.ranks != *world_size) {
      throw UsageError(fmt::format(
          "--ranks {}: the launcher made a world of {}; leave --ranks out "
          "under a launcher",
          options.ranks,
          *world_size));
    }
    return *world_size;
  }
  if (options.ranks != 0) {
    return options.ranks;
  }
  return axes.empty() ? 1 : ranks_of(axes);
}

void check_batch_axis(const std::string& text, const std::vector<Axis>& axes) {
  if (std::none_of(axes.begin(), axes.end(), [](const Axis& axis) {
        return axis.name == kBatchAxis;
      })) {
    throw UsageError(fmt::format(
        "--mesh {}: no axis {}, which the batch is cut along; try {}={}",
        text,
        kBatchAxis,
        kBatchAxis,
        ranks_of(axes)));
  }
}

void check_other_axes(const std::string& text, const std::vector<Axis>& axes) {
  for (const Axis& axis : axes) {
    if (axis.name != kBatchAxis && axis.size > 1) {
      throw UsageError(fmt::format(
          "--mesh {}: axis {} has {} ranks, but `train` only cuts the batch so "
          "far; try {}={}",
          text,
          axis.name,
          axis.size,
          kBatchAxis,
          ranks_of(axes)));
    }
  }
}

void check_writable(const char* option, const std::string& path) {
  if (!path.empty() && !std::ofstream(path, std::ios::app)) {
    throw IoError(fmt::format(
        "{} {}: cannot be written; choose a path in a folder that exists",
        option,
        path));
  }
}

// Masters and scaling are kBucketed's.
void check_dtype(const TrainOptions& options) {
  const GradientSync sync = sync_of(options.sync);
  const bool is_bucketed =
      sync == GradientSync::kDefault || sync == GradientSync::kBucketed;
  if (options.dtype != "float32" && (!is_bucketed || options.compare)) {
    throw UsageError(fmt::format(
        "--dtype {}: only --sync bucketed keeps float32 masters of 16-bit "
        "weights; take that, without --compare, or float32",
        options.dtype));
  }
}

void fill_defaults(TrainOptions& options) {
  if (options.steps == 0) {
    options.steps = options.compare ? kDefaultCompareSteps : kDefaultSteps;
  }
  if (!options.warmup) {
    options.warmup = options.steps / 20;
  }
  if (options.validation_every == 0) {
    options.validation_every = std::max<int64_t>(options.steps / 10, 1);
  }
}

TrainerOptions trainer_options(const TrainOptions& options) {
  TrainerOptions trainer;
  trainer.model = load_llama_config(options.model);
  trainer.dtype = entry_of(kDtypes, options.dtype).dtype;
  trainer.optimizer = entry_of(kOptimizers, options.optimizer).optimizer;
  trainer.schedule = {
      .peak = options.learning_rate,
      .warmup = *options.warmup,
      .steps = options.steps};
  trainer.batch = options.batch;
  trainer.sequence = options.sequence;
  trainer.weight_decay = options.weight_decay;
  trainer.clip = options.clip;
  trainer.seed = options.seed;
  trainer.validation_fraction = options.validation_fraction;
  trainer.sync = sync_of(options.sync);
  trainer.bucket_bytes = options.bucket_mb << 20;
  trainer.overlap = options.overlap;
  trainer.one_pass = options.one_pass;
  trainer.stage = options.stage;
  trainer.passes = options.passes;
  trainer.axis = kBatchAxis;
  return trainer;
}

} // namespace

void declare_train_options(CLI::App& app, TrainOptions& options) {
  declare_model_options(app, options);
  declare_schedule_options(app, options);
  declare_world_options(app, options);
  app.add_option(
      "--log", options.log, "File that gets a line of JSON per step");
  app.add_flag(
      "--blocks",
      options.blocks,
      "Run as many steps as each line of standard input says, and answer it "
      "with a line of JSON (for `tessera bench train`)");
  app.add_flag(
      "--compare",
      options.compare,
      "Train in every synchronisation mode from the same seed, and print them "
      "side by side");
  app.add_option(
      "--json",
      options.json,
      "File that gets the final table as benchmark rows");
  app.add_option(
      "--trace",
      options.trace,
      "File that gets rank 0's collectives as a Chrome trace; other ranks "
      "write "
      "FILE.rank1 and so on");
}

TrainPlan make_plan(
    const TrainOptions& options, std::optional<int64_t> world_size) {
  TrainPlan plan;
  plan.options = options;
  fill_defaults(plan.options);
  check_dtype(options);
  if (!options.mesh.empty()) {
    plan.axes = parse_mesh(options.mesh);
    check_batch_axis(options.mesh, plan.axes);
  }
  plan.ranks = world_of(options, plan.axes, world_size);
  if (plan.axes.empty()) {
    plan.axes = {{kBatchAxis, plan.ranks}};
  }
  plan.axes = fit_mesh(options.mesh, plan.axes, plan.ranks);
  check_other_axes(options.mesh, plan.axes);
  plan.trainer = trainer_options(plan.options);
  if (options.sequence > plan.trainer.model.max_position_embeddings) {
    throw UsageError(fmt::format(
        "--seq {}: the model's max_position_embeddings is {}; take a shorter "
        "sequence or raise it in the model's file",
        options.sequence,
        plan.trainer.model.max_position_embeddings));
  }
  plan.file = std::make_shared<TokenFile>(options.data);
  LoaderOptions loader;
  loader.sequence = options.sequence;
  loader.global_batch = options.batch * plan.ranks;
  loader.validation_fraction = options.validation_fraction;
  const TokenLoader check(plan.file, loader);
  check_writable("--log", options.log);
  check_writable("--json", options.json);
  check_writable("--trace", options.trace);
  return plan;
}

} // namespace tessera::cli
