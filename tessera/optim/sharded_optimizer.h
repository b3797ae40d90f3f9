// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/tensor_spec.h>
#include <tessera/optim/flat_shard.h>
#include <tessera/optim/optimizer_state.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace torch::nn {
class Module;
}

namespace tessera {

// What happens to Partial gradients before the update runs.
enum class GradientSync : uint8_t {
  kDefault, // kBucketed, or what the environment says:
            // FLAGS_fuse_allreduce_in_opt, FLAGS_fuse_reducescatter_in_opt
  kImplicit, // nothing: each operator that reads a gradient reduces it
  kAllReduce, // every Partial axis becomes Replicate
  kReduceScatter, // every gradient goes straight to where its optimizer state
                  // lives
  kBucketed // gradients and parameters lie in flat buffers; each buffer is one
            // reduce_scatter, one update and one all_gather
};

// What is sharded over one mesh axis: ShardingStage1 or ShardingStage2.
struct ShardingStage {
  std::string axis;
  int stage;
};

// The optimizer's states.
struct ShardingStage1 : ShardingStage {
  explicit ShardingStage1(std::string axis_name)
      : ShardingStage{std::move(axis_name), 1} {}
};

// The states and the gradients: every backward reduces them, and only this
// rank's part stays. `p.grad()` then is a marker without memory that reads as
// NaN, so clip with the optimizer's clip_grad_norm, and drop gradients with its
// zero_grad. Of kBucketed only.
struct ShardingStage2 : ShardingStage {
  explicit ShardingStage2(std::string axis_name)
      : ShardingStage{std::move(axis_name), 2} {}
};

// How parameters of bfloat16 and float16 are updated; all rules compute in
// float32. Wider parameters are the same in each.
enum class NarrowUpdate : uint8_t {
  kMasterWeights, // beside their float32 values, of which this rank holds its
                  // part; states in float32
  kStochasticRounding, // rounded up as often as the value is near its upper
                       // neighbour, so that small updates are not lost; states
                       // in float32
  kNearest // rounded to nearest; states in the parameter's dtype, as torch's
};

struct ShardOptions {
  GradientSync sync = GradientSync::kDefault;

  // Of kBucketed:
  int64_t bucket_bytes = int64_t{64}
      << 20; // parameters of one flat buffer, at most
  bool overlap = false; // a buffer's reduction begins during backward, as soon
                        // as its gradients are there, on a thread of its own
                        // where the backend needs one
  // Where all ranks share memory, reduction, update and the return of the
  // parameters are one pass over it, unless the step was clipped. There are no
  // reduced gradients then. Of ShardingStage1 without overlap.
  bool one_pass = false;
  // The other modes update as torch does.
  NarrowUpdate narrow_update = NarrowUpdate::kMasterWeights;
  uint64_t rounding_seed = 0; // of kStochasticRounding; alike on all ranks
  // In which gradients accumulate and are reduced: their buffers, and so
  // `p.grad()`, have this dtype. Default: float32 for parameters of 16 bits,
  // else the parameter's own.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
};

struct ClipOptions {
  // A norm that is infinite or NaN is a UsageError on every rank, which names
  // the parameters whose gradients have such elements; nothing is clipped.
  bool error_if_nonfinite = false;
  // Only the parameters of this one of `param_groups()`; all by default.
  std::optional<size_t> group = std::nullopt;
};

// What this rank holds beside parameters and gradients.
struct OptimizerMemory {
  int64_t state_bytes =
      0; // of the optimizer's states: 1/N of one rank's for shapes that divide
  int64_t master_bytes = 0; // of float32 values of 16-bit parameters, likewise
  int64_t gradient_bytes = 0; // of reduced gradients, kept from step to step
};

// What kBucketed does, summed up since the optimizer was made.
struct BucketStatistics {
  int64_t buckets = 0; // each is one reduce_scatter and one all_gather
  int64_t local_buckets = 0; // whose gradients are whole on every rank
  int64_t copies = 0; // of gradients into their buffers
  int64_t repeated_reductions = 0; // of buffers whose gradients were written to
                                   // after their reduction had begun
};

// While it lives, backward passes only accumulate: no reduction begins in them.
class AccumulationScope {
 public:
  explicit AccumulationScope(std::shared_ptr<void> end)
      : end_(std::move(end)) {}

 private:
  std::shared_ptr<void> end_;
};

// A torch optimizer over distributed parameters whose states are sharded. It
// owns groups and options, so that LR schedulers, `param_groups()`,
// `add_param_group()` and `zero_grad()` work as ever. Parameters without a
// gradient are skipped, as torch does. In a step the gradients are reduced once
// (all collectives in flight together), each rank updates its own part of every
// parameter with the fused kernel, and the parts are gathered, so that every
// axis of a parameter is back as it was before. `state()` holds torch's own
// state types; their tensors are distributed and placed as `shard_gradient`
// says. A parameter that appears several times (tied weights) counts once.
class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  ShardedOptimizer(
      torch::optim::Optimizer&& optimizer,
      ShardingStage stage,
      const ShardOptions& options);
  ~ShardedOptimizer() override;
  ShardedOptimizer(ShardedOptimizer&&) noexcept;
  ShardedOptimizer& operator=(ShardedOptimizer&&) noexcept;
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // One update. A second step without a backward in between uses the same
  // gradients. Collective over the parameters'
  // meshes. Blocks. Throws UsageError, TimeoutError, PeerError.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // As torch's. In ShardingStage2 gradients always become undefined.
  void zero_grad(bool set_to_none = true);

  // Scales the gradients so that their global norm is at most `max_norm`, and
  // returns the norm before. `norm_type` is any positive number or infinity.
  // Every distinct element counts once, over all meshes and axes. Reduces the
  // gradients (`step` uses them then) and runs one scalar all_reduce. Before
  // `step`, after `backward`. In kImplicit it is torch's own clip_grad_norm_ on
  // the Partial gradients. Collective over the world, also for a rank without
  // gradients. Blocks. Throws UsageError, TimeoutError, PeerError.
  double clip_grad_norm(
      double max_norm, double norm_type = 2.0, const ClipOptions& options = {});

  // Every element of the reduced gradients becomes at most `limit` and at least
  // -limit, of one group or of all. Clips follow one another in any order.
  // Before `step`, after `backward`. Collective over the world. Blocks. Throws
  // UsageError, TimeoutError, PeerError.
  void clip_grad_value(
      double limit, std::optional<size_t> group = std::nullopt);

  // What GradScaler calls. Until the end of the next step, gradients count as
  // divided by `scale`; that step is step_if_finite. Not collective. Throws
  // UsageError in modes other than kBucketed.
  void unscale(double scale);
  // One update, unless an element of a gradient is infinite or NaN on any rank
  // after `unscale`: then every rank leaves parameters, states and counts of
  // steps as they are, and returns false. Collective as step.
  bool step_if_finite();

  // Errors then say the names that the module has for the parameters.
  void name_parameters(const torch::nn::Module& module);

  // The gradient that `step` uses: reduced, and clipped if clip_grad_norm ran.
  // Undefined until one of the two has run in kAllReduce or kReduceScatter
  // since the parameter's last backward. `p.grad()` itself stays the unreduced
  // Partial until zero_grad. Not collective. Throws UsageError in kBucketed:
  // see reduced_shard.
  at::Tensor reduced_gradient(const at::Tensor& parameter) const;

  // The same in kBucketed, where this rank has a flat range of it, before
  // clipping and unscaling. No values until the parameter's first reduction.
  // Not collective. Throws UsageError in other modes.
  FlatShard reduced_shard(const at::Tensor& parameter) const;

  // For all backward passes of a step but the last: with overlap, reductions
  // begin in the last one only. Without it the result is the same, but
  // gradients are reduced again (see BucketStatistics). Not collective.
  AccumulationScope accumulate();

  BucketStatistics bucket_statistics() const;

  // The mode in effect now. Throws UsageError when the environment asks for
  // two.
  GradientSync sync() const;

  OptimizerMemory memory() const;
  int64_t state_bytes() const {
    return memory().state_bytes;
  }

  // The whole state, by the names of the module's parameters; every rank gets
  // it. Changes nothing. Options and schedules are not in it. Collective over
  // the parameters' meshes. Throws UsageError for a parameter of the optimizer
  // that the module does not have.
  OptimizerState state_dict(const torch::nn::Module& module) const;
  // Replaces the state by one of any world size, mode or stage; what it does
  // not name is left alone. Every rank passes the whole, which is kept until
  // each parameter's first gradient. Not collective. Throws UsageError for
  // names and shapes that do not fit.
  void load_state_dict(
      const torch::nn::Module& module, const OptimizerState& state);

  // Distributed states have no file format yet: these throw UsageError.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Shards the states of `optimizer` (AdamW, Adam, or SGD; not stepped yet) over
// one mesh axis and takes over its parameters and options:
//   auto optimizer = shard_optimizer(torch::optim::AdamW(model->parameters(),
//   3e-4), ShardingStage1("dp"));
// The parameters are distributed tensors; on a mesh without that axis states
// follow the mesh's other axes. Not collective. Throws UsageError for another
// optimizer, a plain parameter, an axis that no parameter's mesh has.
ShardedOptimizer shard_optimizer(
    torch::optim::Optimizer&& optimizer,
    ShardingStage stage,
    const ShardOptions& options = {});

} // namespace tessera
