// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// "[1024,512]", as shapes read in messages; "[]" when empty.
std::string bracketed(std::span<const int64_t> values);

// Copies `text` into a fixed, zero-terminated buffer of `capacity` bytes, cut
// where it does not fit.
void copy_text(char* buffer, std::size_t capacity, std::string_view text);

} // namespace tessera
