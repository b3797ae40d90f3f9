// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/mesh_option.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>

namespace tessera::cli {
namespace {

constexpr int64_t kLargestAxis = int64_t{1} << 20;

bool is_name(std::string_view text) {
  const auto fits = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_';
  };
  return !text.empty() &&
      std::isdigit(static_cast<unsigned char>(text.front())) == 0 &&
      std::all_of(text.begin(), text.end(), fits);
}

[[noreturn]] void fail(
    const std::string& mesh, std::string_view part, const char* what) {
  throw UsageError(fmt::format(
      "--mesh {}: \"{}\" {}; write NAME=SIZE[,NAME=SIZE...], as in dp=2",
      mesh,
      part,
      what));
}

Axis parse_axis(const std::string& mesh, std::string_view part) {
  const size_t equals = part.find('=');
  if (equals == std::string_view::npos || !is_name(part.substr(0, equals))) {
    fail(mesh, part, "does not name an axis and its size");
  }
  Axis axis{std::string(part.substr(0, equals)), 0};
  const std::string_view digits = part.substr(equals + 1);
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), axis.size);
  if (error != std::errc() || end != digits.data() + digits.size() ||
      axis.size < 1 || axis.size > kLargestAxis) {
    fail(mesh, part, "has no size of at least 1");
  }
  return axis;
}

// The mesh whose last axis takes what the others leave of the ranks.
std::string suggestion(std::vector<Axis> axes, int64_t ranks) {
  const int64_t others = ranks_of(axes) / axes.back().size;
  if (ranks % others != 0) {
    return fmt::format("{}={}", axes.front().name, ranks);
  }
  axes.back().size = ranks / others;
  std::string text;
  for (const Axis& axis : axes) {
    text +=
        fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  }
  return text;
}

} // namespace

std::vector<Axis> parse_mesh(const std::string& text) {
  std::vector<Axis> axes;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    const Axis axis = parse_axis(text, rest.substr(0, comma));
    if (std::any_of(axes.begin(), axes.end(), [&](const Axis& other) {
          return other.name == axis.name;
        })) {
      fail(text, axis.name, "is there twice");
    }
    axes.push_back(axis);
    if (ranks_of(axes) > kLargestAxis) {
      fail(text, rest.substr(0, comma), "makes too many ranks");
    }
    if (comma == std::string_view::npos) {
      return axes;
    }
    rest.remove_prefix(comma + 1);
  }
}

int64_t ranks_of(const std::vector<Axis>& axes) {
  int64_t ranks = 1;
  for (const Axis& axis : axes) {
    ranks *= axis.size;
  }
  return ranks;
}

void check_mesh(
    const std::string& text, const std::vector<Axis>& axes, int64_t ranks) {
  if (ranks_of(axes) != ranks) {
    throw UsageError(fmt::format(
        "--mesh {} needs {} ranks, world size is {}; try {}",
        text,
        ranks_of(axes),
        ranks,
        suggestion(axes, ranks)));
  }
}

} // namespace tessera::cli
