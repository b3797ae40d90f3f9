// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/text.h>

#include <algorithm>
#include <cstring>

namespace tessera {

std::string bracketed(std::span<const int64_t> values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) {
      text += ',';
    }
    text += std::to_string(values[i]);
  }
  text += ']';
  return text;
}

void copy_text(char* buffer, std::size_t capacity, std::string_view text) {
  const std::size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(buffer, text.data(), length);
  buffer[length] = '\0';
}

} // namespace tessera
