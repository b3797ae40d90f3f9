// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/environment.h>
#include <tessera/base/error.h>

#include <charconv>
#include <cstdlib>

namespace tessera {

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::string(value);
}

std::optional<int64_t> environment_int(const std::string& name) {
  const auto text = environment(name);
  if (!text) {
    return std::nullopt;
  }
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end) {
    throw UsageError(
        "environment: " + name + "=" + *text +
        ", expected a whole number; correct or unset it");
  }
  return value;
}

} // namespace tessera
