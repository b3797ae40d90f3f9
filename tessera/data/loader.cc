// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/data/loader.h>
#include <tessera/data/permutation.h>
#include <tessera/mesh/chunk.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// A row needs one token more than its length: the last target.
int64_t rows_in(int64_t tokens, int64_t sequence) {
  return tokens > sequence ? (tokens - 1) / sequence : 0;
}

void check(const LoaderOptions& options) {
  if (options.sequence < 1 || options.global_batch < 1) {
    throw UsageError(fmt::format(
        "data: batch of {} rows of {} tokens; both must be at least 1",
        options.global_batch,
        options.sequence));
  }
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw UsageError(fmt::format(
        "data: validation fraction {}; expected at least 0 and less than 1",
        options.validation_fraction));
  }
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    throw UsageError(fmt::format(
        "data: rank {} of {}; expected 0 to {}",
        options.rank,
        options.ranks,
        options.ranks - 1));
  }
}

void check_tokens(
    const std::vector<int64_t>& tokens,
    int64_t offset,
    const TokenFile& file,
    int64_t vocab_size) {
  if (vocab_size >= file.vocab_size()) {
    return;
  }
  const auto wrong =
      std::find_if(tokens.begin(), tokens.end(), [&](int64_t token) {
        return token >= vocab_size;
      });
  if (wrong != tokens.end()) {
    throw CorruptionError(fmt::format(
        "data [{}]: token {} at place {}, the model's vocab_size is {}; use a "
        "model with a larger vocabulary, or the tokenizer that the "
        "model was made for",
        file.path(),
        *wrong,
        offset + (wrong - tokens.begin()),
        vocab_size));
  }
}

} // namespace

TokenLoader::TokenLoader(
    std::shared_ptr<const TokenFile> file, const LoaderOptions& options)
    : file_(std::move(file)), options_(options) {
  check(options);
  const int64_t total = file_->size();
  const auto validation = static_cast<int64_t>(
      std::ceil(static_cast<double>(total) * options.validation_fraction));
  train_tokens_ = total - validation;
  train_rows_ = rows_in(train_tokens_, options.sequence);
  validation_rows_ = rows_in(validation, options.sequence);
  const bool wants_validation = options.validation_fraction > 0;
  if (train_rows_ == 0 || (wants_validation && validation_rows_ == 0)) {
    throw UsageError(fmt::format(
        "data [{}]: {} tokens, {} of them for validation; a part needs at "
        "least {} for one row of sequence length {}; use a longer file, a "
        "shorter sequence or another validation fraction",
        file_->path(),
        total,
        validation,
        options.sequence + 1,
        options.sequence));
  }
}

int64_t TokenLoader::train_offset(int64_t row) const {
  const int64_t epoch = row / train_rows_;
  const Permutation order(
      train_rows_,
      options_.seed + static_cast<uint64_t>(epoch) * 0x632be59bd9b4e019U);
  return order(row % train_rows_) * options_.sequence;
}

template <typename OffsetOf>
Batch TokenLoader::gather(OffsetOf&& offset_of) const {
  const Chunk mine =
      chunk(options_.global_batch, 1, options_.ranks, options_.rank);
  const int64_t sequence = options_.sequence;
  const at::TensorOptions int64(at::kLong);
  Batch batch{
      at::empty({mine.size, sequence}, int64),
      at::empty({mine.size, sequence}, int64)};
  int64_t* tokens = batch.tokens.mutable_data_ptr<int64_t>();
  int64_t* targets = batch.targets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> row(static_cast<size_t>(sequence) + 1);
  for (int64_t i = mine.offset; i < mine.offset + mine.size; ++i) {
    const int64_t offset = offset_of(i);
    file_->read(offset, row);
    check_tokens(row, offset, *file_, options_.vocab_size);
    tokens = std::copy(row.begin(), row.end() - 1, tokens);
    targets = std::copy(row.begin() + 1, row.end(), targets);
  }
  return batch;
}

Batch TokenLoader::train(int64_t step) const {
  return gather([&](int64_t i) {
    return train_offset(step * options_.global_batch + i);
  });
}

Batch TokenLoader::validation(int64_t index, int64_t count) const {
  if (validation_rows_ == 0 || index < 0 || index >= count) {
    throw UsageError(fmt::format(
        "data: validation batch {} of {} from {} rows; set a validation "
        "fraction",
        index,
        count,
        validation_rows_));
  }
  const int64_t wanted = count * options_.global_batch;
  return gather([&](int64_t i) {
    const int64_t row =
        (index * options_.global_batch + i) * validation_rows_ / wanted;
    return train_tokens_ + row * options_.sequence;
  });
}

} // namespace tessera
