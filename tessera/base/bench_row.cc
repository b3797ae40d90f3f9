// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/bench_row.h>
#include <tessera/base/error.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

nlohmann::ordered_json number_or_null(double value, bool present) {
  return present && std::isfinite(value) ? nlohmann::ordered_json(value)
                                         : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json json_of(const BenchRow& row) {
  const bool compared = !row.against.empty();
  return {
      {"name", row.name},
      {"value", number_or_null(row.value, true)},
      {"unit", row.unit},
      {"against",
       compared ? nlohmann::ordered_json(row.against)
                : nlohmann::ordered_json(nullptr)},
      {"ratio", number_or_null(row.ratio, compared)}};
}

} // namespace

std::string to_json(const std::vector<BenchRow>& rows) {
  std::string text = "[";
  for (const BenchRow& row : rows) {
    text += text.size() == 1 ? "\n  " : ",\n  ";
    text += json_of(row).dump();
  }
  return text + "\n]\n";
}

void write_json(const std::vector<BenchRow>& rows, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  file << to_json(rows);
  file.close();
  if (!file) {
    throw IoError(fmt::format(
        "write {}: {}; choose a path in a folder that exists and can be "
        "written",
        path,
        std::strerror(errno)));
  }
}

} // namespace tessera
