// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/record.h>
#include <tessera/comm/reduce_op.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace tessera {

constexpr std::size_t kMaxHeaderDims = 16;

// What a rank calls, as it knows it. Calls have a shape, or counts per rank.
struct CallDescription {
  CollectiveKind kind;
  at::ScalarType dtype = at::kByte;
  std::optional<ReduceOp> op = std::nullopt;
  int64_t root = -1;
  std::optional<at::IntArrayRef> shape = std::nullopt;
  std::span<const int64_t> counts = {};
  std::span<const int64_t> out_counts =
      {}; // all_to_all only; `counts` are then what this rank gives
};

// One call as one rank announces it to the others: bytes that may be copied
// from process to process. The counts of the call travel beside it.
struct CallHeader {
  uint64_t seq;
  CollectiveKind kind;
  ReduceOp op;
  int8_t dtype;
  bool has_op;
  int64_t root; // -1: none
  int64_t ndim; // -1: the call has counts instead of a shape
  std::array<int64_t, kMaxHeaderDims> sizes;
  std::array<char, 48> asker;
};

// The header of a call, with the asker of this thread's AskerScope.
CallHeader header_of(const CallDescription& call, uint64_t seq);

// A header and who announces it, to be sent from process to process.
struct CallCard {
  CallHeader header;
  int64_t pid;
  std::array<char, 64> host;
};

CallCard card_of(
    const CallDescription& call, uint64_t seq, const std::string& host);

// The first sizeof(CallCard) of the bytes that a peer sent, changed where they
// could not be read at all.
CallCard read_card(const std::byte* bytes);
// Whether a peer's header can be described and compared.
bool is_sound(const CallHeader& header);

// A header with its counts, as one rank wrote it.
struct Announcement {
  const CallHeader& header;
  std::span<const int64_t> counts; // what the rank gives, or all ranks' counts
  std::span<const int64_t> out_counts; // what it takes, in an all_to_all
};

// "all_reduce(sum) of Float [100] asked by mm".
std::string describe(const Announcement& call);

// What of two calls does not go together: "operations", "dtypes", ...; null
// when they match.
const char* find_mismatch(const Announcement& mine, const Announcement& theirs);

} // namespace tessera
