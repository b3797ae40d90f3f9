// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/data/loader.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/models/llama_config.h>
#include <tessera/models/schedule.h>
#include <tessera/models/step_report.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

class Llama;
enum class GradientSync : uint8_t; // tessera/optim/sharded_optimizer.h

// SGD has momentum 0.9; the others torch's usual settings, AdamW and Adam with
// betas 0.9 and 0.95.
enum class TrainerOptimizer : uint8_t {
  kAdamW,
  kAdam,
  kSgd,
  kRmsprop,
  kAdagrad,
  kLion
};

struct TrainerOptions {
  LlamaConfig model;
  // Of weights and activations: float32, bfloat16, or float16, whose losses a
  // GradScaler scales. The optimizer keeps float32 masters of 16-bit weights.
  c10::ScalarType dtype = c10::kFloat;
  TrainerOptimizer optimizer = TrainerOptimizer::kAdamW;
  Schedule schedule;
  int64_t batch = 8; // rows per rank and backward pass
  int64_t passes = 1; // backward passes whose gradients a step accumulates
  int64_t sequence = 128; // tokens per row
  double weight_decay = 0.1;
  double clip = 1.0; // largest global norm of the gradients; 0: no clipping
  uint64_t seed = 0; // of weights and of the data's order
  double validation_fraction = 0.05;
  GradientSync sync{}; // kDefault
  int64_t bucket_bytes = int64_t{64} << 20; // of a flat buffer, at most
  bool overlap = false; // reductions begin during backward
  bool one_pass = false; // ShardOptions::one_pass
  int stage = 1; // of ZeRO: 1 or 2
  std::string axis =
      "dp"; // mesh axis that the batch and the optimizer's states are cut along
};

// Trains a Llama on a token file, its batch cut along one mesh axis
// and its optimizer sharded over the same. Every rank of the mesh makes one
// with the same options. Runs with the same seed and global batch give the same
// losses, to rounding, on any number of ranks and in every synchronisation
// mode.
class Trainer {
 public:
  // Collective over the mesh. Throws UsageError for options that fit neither
  // model, mesh nor file.
  Trainer(
      const DeviceMesh& mesh,
      const TrainerOptions& options,
      std::shared_ptr<const TokenFile> file);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // One step: forward, backward, clip, update. Collective over the mesh.
  // Blocks. Throws TimeoutError, PeerError, CorruptionError.
  StepReport step();

  // Mean loss over `batches` batches of the validation part, always the same
  // ones. Collective over the mesh. Blocks.
  double validation_loss(int64_t batches) const;

  int64_t tokens_per_step() const; // of all ranks
  int64_t state_bytes() const; // optimizer state on this rank, with masters
  const TokenLoader& loader() const;
  const Llama& model() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
