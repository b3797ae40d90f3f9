// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/table.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera::cli {

Table::Table(std::vector<std::string> head) {
  rows_.push_back(std::move(head));
}

void Table::add(std::vector<std::string> row) {
  row.resize(rows_.front().size());
  rows_.push_back(std::move(row));
}

std::string Table::str() const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t i = 0; i < widths.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", rows_[r][i], widths[i])
                     : fmt::format("  {:>{}}", rows_[r][i], widths[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
    if (r == 0) {
      text += std::string(line.size(), '-') + '\n';
    }
  }
  return text;
}

std::string with_commas(double value) {
  std::string digits = fmt::format("{:.0f}", std::fabs(value));
  for (size_t place = digits.size(); place > 3; place -= 3) {
    digits.insert(place - 3, ",");
  }
  return fmt::format("{}{}", value < 0 ? "-" : "", digits);
}

std::string clock_text(double seconds) {
  const auto whole = static_cast<long long>(std::max(0.0, std::round(seconds)));
  if (whole >= 3600) {
    return fmt::format(
        "{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  }
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

} // namespace tessera::cli
