// SPDX-License-Identifier: Apache-2.0
#include <tessera/comm/reduce_op.h>

#include <array>

namespace tessera {

std::string_view name_of(ReduceOp op) {
  static constexpr std::array<std::string_view, 5> kNames = {
      "sum", "avg", "min", "max", "product"};
  return kNames.at(static_cast<std::size_t>(op));
}

} // namespace tessera
