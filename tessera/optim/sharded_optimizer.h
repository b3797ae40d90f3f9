// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tessera {

// What happens to Partial gradients before the inner optimizer runs.
enum class GradientSync : uint8_t {
  kDefault, // kReduceScatter, or what the environment says (FLAGS_fuse_allreduce_in_opt, FLAGS_fuse_reducescatter_in_opt)
  kImplicit, // nothing: each operator that reads a gradient reduces it
  kAllReduce, // every Partial axis becomes Replicate
  kReduceScatter // every gradient goes straight to where its optimizer state lives
};

// Optimizer states are sharded over one mesh axis.
struct ShardingStage1 {
  explicit ShardingStage1(std::string axis_name) : axis(std::move(axis_name)) {}
  std::string axis;
};

// shard_optimizer(torch optimizer, ShardingStage1(axis), options) -> ShardedOptimizer, a torch::optim::Optimizer: see design.md.

} // namespace tessera
