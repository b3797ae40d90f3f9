// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/number_option.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

namespace tessera::cli {
namespace {

// A check that all of the text is a finite number of type T for which `fits`.
template <typename T, typename Fits>
CLI::Validator number(const std::string& allowed, Fits fits) {
  const auto check = [allowed, fits](const std::string& text) {
    T value = 0;
    const char* const end = text.data() + text.size();
    const auto [read, error] = std::from_chars(text.data(), end, value);
    const bool all = read == end && error != std::errc::invalid_argument;
    if (all && error == std::errc() &&
        std::isfinite(static_cast<double>(value)) && fits(value)) {
      return std::string();
    }
    return fmt::format(
        "got {}{}; expected {}",
        text.empty() ? "nothing" : text,
        all && error == std::errc::result_out_of_range
            ? ", which is beyond what can be counted"
            : "",
        allowed);
  };
  return CLI::Validator(check, "");
}

} // namespace

CLI::Validator whole_number(int64_t least) {
  return number<int64_t>(
      fmt::format("a whole number of at least {}", least),
      [least](int64_t value) { return value >= least; });
}

CLI::Validator whole_number(int64_t least, int64_t most) {
  return number<int64_t>(
      fmt::format("a whole number from {} to {}", least, most),
      [least, most](int64_t value) { return value >= least && value <= most; });
}

CLI::Validator number_above_zero() {
  return number<double>(
      "a number greater than 0", [](double value) { return value > 0; });
}

CLI::Validator number_from_zero() {
  return number<double>(
      "0 or a greater number", [](double value) { return value >= 0; });
}

CLI::Validator part_of_one() {
  return number<double>("a number of at least 0 and less than 1", [](double v) {
    return v >= 0 && v < 1;
  });
}

} // namespace tessera::cli
