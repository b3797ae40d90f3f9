// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/data/token_file.h>

#include <cstdint>
#include <memory>

namespace tessera {

// Rows of tokens and, at each place, the token that follows it: both [rows,
// sequence], int64.
struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

struct LoaderOptions {
  int64_t sequence = 128; // tokens per row
  int64_t global_batch = 8; // rows of all ranks together
  double validation_fraction = 0.05; // of the file, its end; 0: none
  uint64_t seed = 0;
  int64_t vocab_size =
      256; // of the model; a larger token in the file is an error
  int64_t rank = 0; // which part of each batch this loader reads
  int64_t ranks = 1;
};

// Cuts a token file into rows and deals them out. Batch `step` depends on the
// seed and the step alone, and rank r of n reads chunk(rows, 1, n, r) of it:
// any number of ranks with the same global batch sees the same data. Every row
// of the training part comes once an epoch, in an order of its own in each.
// Nothing is communicated and nothing is kept between calls, so that a run can
// go on from any step.
class TokenLoader {
 public:
  // Throws UsageError for options out of range and for a file too short for
  // them.
  TokenLoader(
      std::shared_ptr<const TokenFile> file, const LoaderOptions& options);

  // This rank's rows of training batch `step` (from 0). Throws CorruptionError
  // for a token outside the vocabulary.
  Batch train(int64_t step) const;

  // This rank's rows of validation batch `index` of `count`; they are spread
  // evenly over the validation part, the same in every call.
  Batch validation(int64_t index, int64_t count) const;

  int64_t train_rows() const { // per epoch, all ranks together
    return train_rows_;
  }
  int64_t validation_rows() const {
    return validation_rows_;
  }
  const LoaderOptions& options() const {
    return options_;
  }

 private:
  int64_t train_offset(int64_t row) const;
  template <typename OffsetOf>
  Batch gather(OffsetOf&& offset_of) const;

  std::shared_ptr<const TokenFile> file_;
  LoaderOptions options_;
  int64_t train_tokens_ = 0;
  int64_t train_rows_ = 0;
  int64_t validation_rows_ = 0;
};

} // namespace tessera
