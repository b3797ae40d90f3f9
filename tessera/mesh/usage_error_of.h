// SPDX-License-Identifier: Apache-2.0
// For tests.
#pragma once

#include <tessera/base/error.h>

#include <string>

namespace tessera {

// The text of the UsageError that a call throws.
template <typename Fn>
std::string usage_error(Fn&& fn) {
  try {
    fn();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

} // namespace tessera
