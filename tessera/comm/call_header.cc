// SPDX-License-Identifier: Apache-2.0
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <tessera/base/text.h>
#include <tessera/comm/call_header.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

std::span<const int64_t> shape_of(const CallHeader& header) {
  const auto ndim = std::min(
      static_cast<std::size_t>(std::max<int64_t>(header.ndim, 0)),
      kMaxHeaderDims);
  return {header.sizes.data(), ndim};
}

} // namespace

CallHeader header_of(const CallDescription& call, uint64_t seq) {
  CallHeader header{};
  header.seq = seq;
  header.kind = call.kind;
  header.dtype = static_cast<int8_t>(call.dtype);
  header.has_op = call.op.has_value();
  header.op = call.op.value_or(ReduceOp::kSum);
  header.root = call.root;
  header.ndim = call.shape ? static_cast<int64_t>(call.shape->size()) : -1;
  if (call.shape) {
    std::copy_n(
        call.shape->begin(),
        std::min(call.shape->size(), kMaxHeaderDims),
        header.sizes.begin());
  }
  copy_text(header.asker.data(), header.asker.size(), AskerScope::current());
  return header;
}

CallCard card_of(
    const CallDescription& call, uint64_t seq, const std::string& host) {
  CallCard card{};
  card.header = header_of(call, seq);
  card.pid = getpid();
  copy_text(card.host.data(), card.host.size(), host);
  return card;
}

CallCard read_card(const std::byte* bytes) {
  std::array<std::byte, sizeof(CallCard)> raw{};
  std::copy_n(bytes, raw.size(), raw.begin());
  std::byte& flag = raw[offsetof(CallHeader, has_op)];
  flag = std::byte{flag != std::byte{0}}; // a bool can hold nothing else
  CallCard card;
  std::memcpy(&card, raw.data(), raw.size());
  card.header.asker.back() = '\0';
  card.host.back() = '\0';
  return card;
}

bool is_sound(const CallHeader& header) {
  return header.kind <= kLastCollective && header.op <= ReduceOp::kProduct &&
      header.dtype >= 0 &&
      header.dtype < static_cast<int8_t>(at::ScalarType::NumOptions) &&
      header.ndim >= -1 && header.ndim <= static_cast<int64_t>(kMaxHeaderDims);
}

std::string describe(const Announcement& call) {
  const CallHeader& header = call.header;
  std::string text(name_of(header.kind));
  if (header.has_op) {
    text += fmt::format("({})", name_of(header.op));
  }
  if (header.kind != CollectiveKind::kBarrier) {
    text += fmt::format(
        " of {}", c10::toString(static_cast<c10::ScalarType>(header.dtype)));
  }
  if (header.ndim >= 0 && header.kind != CollectiveKind::kBarrier) {
    text += fmt::format(" {}", bracketed(shape_of(header)));
  }
  if (header.ndim < 0 && header.kind == CollectiveKind::kAllToAll) {
    text += fmt::format(
        " giving {} taking {}",
        bracketed(call.counts),
        bracketed(call.out_counts));
  } else if (header.ndim < 0) {
    text += fmt::format(" counts {}", bracketed(call.counts));
  }
  if (header.root >= 0) {
    text += fmt::format(" from rank {}", header.root);
  }
  if (header.asker[0] != '\0') {
    text += fmt::format(" asked by {}", text_in(header.asker));
  }
  return text;
}

const char* find_mismatch(
    const Announcement& mine, const Announcement& theirs) {
  const CallHeader& a = mine.header;
  const CallHeader& b = theirs.header;
  if (a.kind != b.kind) {
    return "operations";
  }
  if (a.seq != b.seq) {
    return "sequence numbers";
  }
  if (a.dtype != b.dtype) {
    return "dtypes";
  }
  if (a.has_op != b.has_op || a.op != b.op) {
    return "reductions";
  }
  if (a.root != b.root) {
    return "roots";
  }
  if (a.ndim != b.ndim || !std::ranges::equal(shape_of(a), shape_of(b))) {
    return "shapes";
  }
  if (a.ndim < 0 && a.kind != CollectiveKind::kAllToAll &&
      !std::ranges::equal(mine.counts, theirs.counts)) {
    return "counts";
  }
  return nullptr;
}

} // namespace tessera
