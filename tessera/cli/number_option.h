// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

// NOLINTNEXTLINE(readability-identifier-naming): CLI11's own name
namespace CLI {
class Validator;
}

namespace tessera::cli {

// Checks of what is given for an option that is a number. Their errors say what
// was got and what is allowed, in words.

// A whole number of at least `least`.
CLI::Validator whole_number(int64_t least);

// A whole number from `least` to `most`.
CLI::Validator whole_number(int64_t least, int64_t most);

// A number greater than 0.
CLI::Validator number_above_zero();

// A number that is 0 or greater.
CLI::Validator number_from_zero();

// A number from 0 up to, but not, 1.
CLI::Validator part_of_one();

} // namespace tessera::cli
