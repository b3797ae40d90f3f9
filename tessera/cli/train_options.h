// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/device_mesh.h>
#include <tessera/models/trainer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class App;
}

namespace tessera::cli {

// What `tessera train` was asked for, as written on the command line.
struct TrainOptions {
  std::string data;
  std::string model = "llama-3m"; // a preset or a JSON file
  int64_t ranks =
      0; // 0: as many as the mesh has, else one; under a launcher its world
  std::string mesh; // empty: dp over all ranks
  std::string backend = "auto";
  std::string dtype = "float32"; // of weights; or "bfloat16", "float16"
  std::string optimizer = "adamw"; // or adam, sgd, rmsprop, adagrad, lion
  std::string sync = "default"; // or an option of sync_modes()
  int64_t bucket_mb = 64; // MiB of parameters in a flat buffer, at most
  bool overlap = false; // reductions begin during backward
  bool one_pass = false; // reduce, update and gather in one pass over memory
  int stage = 1; // of ZeRO
  int64_t passes = 1; // backward passes per step
  int64_t batch = 8; // rows per rank and step
  int64_t sequence = 128;
  int64_t steps = 0; // 0: kDefaultSteps, or kDefaultCompareSteps with --compare
  double learning_rate = 2e-3;
  std::optional<int64_t> warmup; // steps; default: a twentieth of all
  double weight_decay = 0.1;
  double clip = 1.0;
  uint64_t seed = 0;
  double validation_fraction = 0.05;
  int64_t validation_every = 0; // steps; 0: a tenth of all
  int64_t validation_batches = 4;
  std::string log; // a line of JSON per step
  std::string json; // benchmark rows
  std::string trace; // collectives as a Chrome trace, a file per rank
  bool compare = false;
  bool blocks = false; // steps on demand
};

// Declares the options of `tessera train` on its subcommand; parsing fills
// `options`, which must live as long as `app`.
void declare_train_options(CLI::App& app, TrainOptions& options);

// Everything that the options lead to, checked before any rank starts.
struct TrainPlan {
  TrainOptions options; // with defaults filled in
  int64_t ranks = 1;
  std::vector<Axis> axes;
  TrainerOptions trainer;
  std::shared_ptr<const TokenFile> file;
};

// `world_size`: what the launcher says, if there is one. Throws UsageError or
// IoError with a remedy.
TrainPlan make_plan(
    const TrainOptions& options, std::optional<int64_t> world_size);

} // namespace tessera::cli
