// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

// The value of an environment variable; nothing when it is unset or empty.
std::optional<std::string> environment(const std::string& name);

// The same as a whole number. Throws UsageError that names the variable when it
// holds anything else.
std::optional<int64_t> environment_int(const std::string& name);

} // namespace tessera
