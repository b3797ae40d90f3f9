// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/optim/flat_bucket.h>
#include <tessera/optim/gradient_hooks.h>
#include <tessera/optim/gradient_summary.h>
#include <tessera/optim/precision.h>
#include <tessera/optim/sharded_optimizer.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera {

struct BucketOptions {
  std::string axis; // that shards
  int64_t bytes; // of a bucket's parameters, at most
  bool overlap; // reductions begin during backward
  // Of ZeRO. 2: unreduced gradients are given up as soon as their bucket is
  // reduced, in every backward.
  int stage;
  Precision precision;
};

// The gradients of an optimizer's parameters in buckets, from autograd's hooks
// to the reduced parts.
//
// Parameters are put into buckets when they have had their first gradient, in
// the order in which these became ready on the rank where each came last. A
// small all_reduce agrees on that order, so it and the buckets are alike on all
// ranks, whatever each of them has seen. The same happens later to parameters
// that had no gradient at first, or that were added.
//
// With overlap, and from stage 2 on, a bucket's reduction begins in backward,
// when it is complete and all buckets before it have begun; what is left at the
// end of the backward begins then, so that every backward reduces every bucket
// once on all ranks. A rank whose gradients are all there waits for the others
// beside its backward, so buckets have groups of their own: collectives that
// the program makes in between cannot come between them.
class BucketedGradients final
    : public GradientListener,
      public std::enable_shared_from_this<BucketedGradients> {
 public:
  explicit BucketedGradients(BucketOptions options)
      : options_(std::move(options)) {}
  ~BucketedGradients() override = default;

  // Hears of these parameters' gradients from now on.
  void watch(const std::vector<at::Tensor>& parameters);

  // Reduces the gradients once for each update, and again those that have been
  // written to since; agrees on which parameters have one and on what else is
  // asked for. The list of parameters is alike on all ranks, and so are writes
  // to gradients after the backward that made them. Collective over the world.
  // Blocks.
  const GradientSummary& reduce(
      const std::vector<at::Tensor>& parameters,
      const GradientQuestion& question);

  // The same without reducing anything, for who reads unreduced gradients
  // himself; not after a reduction since the last update.
  const GradientSummary& agree(
      const std::vector<at::Tensor>& parameters,
      const GradientQuestion& question);
  bool is_reduced() const { // since the last update
    return is_reduced_;
  }

  // The gradients have been used.
  void finish_update();

  // While positive, backward starts no reduction.
  void hold(int delta) {
    held_ += delta;
  }

  std::vector<std::unique_ptr<FlatBucket>>& buckets() {
    return buckets_;
  }
  const std::vector<std::unique_ptr<FlatBucket>>& buckets() const {
    return buckets_;
  }
  struct Place {
    FlatBucket* bucket = nullptr;
    size_t slot = 0;
  };
  // No bucket before the parameter's first reduction.
  Place place_of(const at::Tensor& parameter) const;

  BucketStatistics statistics() const;
  // Of buffers for gradients: reduced ones, and unreduced ones of stage 2.
  int64_t buffer_bytes() const;

  void before_gradient(const at::Tensor& parameter) override;
  void after_gradient(const at::Tensor& parameter) override;

 private:
  bool reduces_in_backward() const {
    return options_.stage > 1 || (options_.overlap && held_ == 0);
  }
  void prepare(const std::vector<at::Tensor>& parameters);
  void begin_pass();
  void end_pass();
  void start_next();
  void make_room(size_t bucket);
  bool reduce_buckets(bool all);
  void exchange(
      const std::vector<at::Tensor>& parameters,
      const GradientQuestion& question,
      bool changed);
  std::vector<bool> present_here(
      const std::vector<at::Tensor>& parameters) const;
  bool place_new(const std::vector<at::Tensor>& parameters);
  void make_buckets(
      const std::vector<at::Tensor>& parameters,
      const std::vector<Placements>& gradients);
  Group group_of(const DeviceMesh& mesh, int64_t axis);

  BucketOptions options_;
  std::recursive_mutex mutex_; // a backward may run on other threads
  std::vector<std::unique_ptr<FlatBucket>> buckets_;
  std::unordered_map<c10::TensorImpl*, Place> places_;
  std::unordered_map<c10::TensorImpl*, bool> watched_;
  std::vector<c10::TensorImpl*> arrivals_; // not in buckets yet
  std::vector<std::vector<bool>> arrived_; // per bucket and slot
  size_t next_to_start_ = 0; // in this backward
  bool is_in_pass_ = false; // of backward
  std::vector<bool> has_begun_; // buckets, in backward since the last update
  bool is_reduced_ = false; // since the last update
  std::shared_ptr<FlatBufferPool> pool_ = std::make_shared<FlatBufferPool>();
  std::vector<bool> seen_present_; // on this rank
  GradientSummary summary_;
  std::unordered_map<std::string, Group> own_groups_;
  int held_ = 0;
  int64_t repeats_ = 0;
};

} // namespace tessera
