// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

// `index` as containers take it: sizes and dimensions are signed everywhere
// else.
constexpr std::size_t at(int64_t index) {
  return static_cast<std::size_t>(index);
}

} // namespace tessera
