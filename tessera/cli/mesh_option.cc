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
constexpr int64_t kRest = -1; // an axis of this size takes the rest

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
      (axis.size < 1 && axis.size != kRest) || axis.size > kLargestAxis) {
    fail(
        mesh,
        part,
        "has no size of at least 1 (or -1, for the ranks that the other axes "
        "leave)");
  }
  return axis;
}

// The axis that takes the rest of the ranks; end() when all sizes are given.
template <typename Axes>
auto find_rest(Axes& axes) {
  return std::find_if(axes.begin(), axes.end(), [](const Axis& axis) {
    return axis.size == kRest;
  });
}

// The mesh in which one axis, the last if none is named for it by -1, takes
// what the others leave of the ranks.
std::string suggestion(std::vector<Axis> axes, int64_t ranks) {
  const auto rest = find_rest(axes);
  Axis& taker = rest == axes.end() ? axes.back() : *rest;
  taker.size = 1;
  if (ranks % ranks_of(axes) != 0) {
    return fmt::format(
        "{}={}", (rest == axes.end() ? axes.front() : taker).name, ranks);
  }
  taker.size = ranks / ranks_of(axes);
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
    if (axis.size == kRest && find_rest(axes) != axes.end()) {
      fail(
          text,
          rest.substr(0, comma),
          "is a second size of -1, but only one axis can take the rest");
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
    ranks *= axis.size == kRest ? 1 : axis.size;
  }
  return ranks;
}

std::vector<Axis> fit_mesh(
    const std::string& text, std::vector<Axis> axes, int64_t ranks) {
  const int64_t given = ranks_of(axes);
  const auto rest = find_rest(axes);
  const bool fits = rest == axes.end() ? given == ranks : ranks % given == 0;
  if (!fits) {
    throw UsageError(fmt::format(
        "--mesh {} needs {}{} ranks, world size is {}; try {}",
        text,
        rest == axes.end() ? "" : "a multiple of ",
        given,
        ranks,
        suggestion(axes, ranks)));
  }
  if (rest != axes.end()) {
    rest->size = ranks / given;
  }
  return axes;
}

} // namespace tessera::cli
