// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// "[1024,512]", as shapes read in messages; "[]" when empty.
std::string bracketed(std::span<const int64_t> values);

// Copies `text` into a fixed, zero-terminated buffer of `capacity` bytes, cut
// where it does not fit.
void copy_text(char* buffer, std::size_t capacity, std::string_view text);

// What copy_text wrote, also where somebody else has overwritten its end.
template <std::size_t kCapacity>
std::string_view text_in(const std::array<char, kCapacity>& buffer) {
  return {buffer.data(), strnlen(buffer.data(), kCapacity)};
}

} // namespace tessera
