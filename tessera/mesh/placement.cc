// SPDX-License-Identifier: Apache-2.0
#include <tessera/mesh/placement.h>

#include <fmt/format.h>

namespace tessera {

std::string Placement::str() const {
  switch (kind_) {
    case Kind::kReplicate:
      return "R";
    case Kind::kShard:
      return unit_ == 1 ? fmt::format("S{}", dim_)
                        : fmt::format("S{}/{}", dim_, unit_);
    case Kind::kPartial:
      return op_ == ReduceOp::kSum ? "P" : fmt::format("P({})", name_of(op_));
  }
  return "?";
}

bool commute(ReduceOp a, ReduceOp b) {
  const auto linear = [](ReduceOp op) {
    return op == ReduceOp::kSum || op == ReduceOp::kAvg;
  };
  return a == b || (linear(a) && linear(b));
}

std::string str(const Placements& placements) {
  std::string text = "[";
  for (const Placement& placement : placements) {
    if (text.size() > 1) {
      text += ", ";
    }
    text += placement.str();
  }
  return text + "]";
}

} // namespace tessera
