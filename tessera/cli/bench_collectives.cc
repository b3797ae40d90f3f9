// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_collectives.h>
#include <tessera/cli/local_ranks.h>
#include <tessera/cli/table.h>
#include <tessera/comm/collectives_bench.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

namespace tessera::cli {
namespace {

// "shm/all_reduce/1KiB".
struct RowName {
  std::string backend;
  std::string collective;
  std::string size;
};

std::optional<RowName> parse(const std::string& name) {
  const auto first = name.find('/');
  const auto second = name.find('/', first + 1);
  if (second == std::string::npos ||
      name.find('/', second + 1) != std::string::npos) {
    return std::nullopt;
  }
  RowName parts{
      name.substr(0, first),
      name.substr(first + 1, second - first - 1),
      name.substr(second + 1)};
  return parts.backend == "memory" ? std::nullopt : std::optional(parts);
}

// What a command writes to its standard output. It runs outside of this job.
std::string output_of(const std::string& name, const std::string& command) {
  const std::string alone =
      "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR "
      "MASTER_PORT; " +
      command;
  FILE* const pipe = popen(alone.c_str(), "r");
  if (pipe == nullptr) {
    throw IoError("--peer " + name + ": cannot start a shell");
  }
  std::string text;
  std::array<char, 4096> buffer{};
  while (const auto bytes = fread(buffer.data(), 1, buffer.size(), pipe)) {
    text.append(buffer.data(), bytes);
  }
  const int status = pclose(pipe);
  if (status != 0) {
    throw IoError(fmt::format(
        "--peer {}: '{}' ended with status {}; run it by itself to see why",
        name,
        command,
        status));
  }
  return text;
}

void add_peers(
    const std::vector<std::string>& peers, std::vector<BenchRow>& rows) {
  for (const std::string& peer : peers) {
    const auto equals = peer.find('=');
    const std::string name = peer.substr(0, equals);
    const auto more = peer_rows(name, output_of(name, peer.substr(equals + 1)));
    rows.insert(rows.end(), more.begin(), more.end());
  }
}

// Every row of a backend gets its ratio against the same row of `yardstick`.
void compare(std::vector<BenchRow>& rows, const std::string& yardstick) {
  std::map<std::string, double> times;
  for (const BenchRow& row : rows) {
    times[row.name] = row.value;
  }
  for (BenchRow& row : rows) {
    const auto parts = parse(row.name);
    if (!parts || parts->backend == yardstick) {
      continue;
    }
    const std::string against =
        fmt::format("{}/{}/{}", yardstick, parts->collective, parts->size);
    const auto found = times.find(against);
    if (found != times.end()) {
      row.against = against;
      row.ratio = row.value / found->second;
    }
  }
}

template <typename T>
void remember(std::vector<T>& seen, const T& value) {
  if (std::find(seen.begin(), seen.end(), value) == seen.end()) {
    seen.push_back(value);
  }
}

std::string cell(const BenchRow& row) {
  const std::string time =
      fmt::format("{:.{}f}", row.value, row.value < 100 ? 1 : 0);
  return row.against.empty() ? time
                             : fmt::format("{} ({:.1f}x)", time, 1 / row.ratio);
}

void print_tables(
    const std::vector<BenchRow>& rows, const std::string& yardstick) {
  std::vector<std::string> backends;
  std::vector<std::pair<std::string, std::string>> lines;
  std::map<std::string, std::string> cells;
  for (const BenchRow& row : rows) {
    if (const auto parts = parse(row.name)) {
      remember(backends, parts->backend);
      remember(lines, {parts->collective, parts->size});
      cells[row.name] = cell(row);
    } else {
      std::cout << fmt::format("{}: {:.1f} {}", row.name, row.value, row.unit);
      std::cout
          << (row.against.empty()
                  ? "\n"
                  : fmt::format(
                        ", {:.0f} % of {}\n", 100 * row.ratio, row.against));
    }
  }
  std::vector<std::string> head{"us (times as fast as " + yardstick + ")"};
  head.insert(head.end(), backends.begin(), backends.end());
  Table table(head);
  std::stable_sort(
      lines.begin(), lines.end(), [](const auto& a, const auto& b) {
        return a.first < b.first;
      });
  for (const auto& [collective, size] : lines) {
    std::vector<std::string> line{fmt::format("{} {}", collective, size)};
    for (const std::string& backend : backends) {
      line.push_back(cells[fmt::format("{}/{}/{}", backend, collective, size)]);
    }
    table.add(line);
  }
  std::cout << table.str();
}

void write_text(const std::string& text, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    throw IoError(
        "write " + path +
        ": failed; choose a path in a folder that exists and can be written");
  }
}

void report(
    const BenchCollectivesOptions& options, std::vector<BenchRow> rows) {
  add_peers(options.peers, rows);
  const bool python = std::ranges::any_of(rows, [](const BenchRow& row) {
    return row.name.starts_with("python_gloo/");
  });
  const std::string yardstick = python ? "python_gloo" : "gloo";
  compare(rows, yardstick);
  print_tables(rows, yardstick);
  if (!options.json.empty()) {
    write_json(rows, options.json);
  }
  if (!options.plot.empty()) {
    write_text(collectives_plot(rows), options.plot);
  }
}

} // namespace

std::vector<BenchRow> peer_rows(
    const std::string& peer, const std::string& printed) {
  std::vector<BenchRow> rows;
  try {
    for (const auto& row : nlohmann::json::parse(printed)) {
      rows.push_back(
          {peer + "/" + row.at("name").get<std::string>(),
           row.at("value").get<double>(),
           "us",
           "",
           0});
    }
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format(
        "--peer {}: printed no rows of JSON ({}); expected [{{\"name\": "
        "\"all_reduce/1KiB\", \"value\": 1.5}}, ...]",
        peer,
        error.what()));
  }
  return rows;
}

int run_bench_collectives(const BenchCollectivesOptions& options) {
  for (const std::string& peer : options.peers) {
    if (peer.find('=') == std::string::npos || peer.front() == '=') {
      throw UsageError(
          "--peer: got '" + peer +
          "', expected NAME=COMMAND, as in "
          "python_gloo='python3 benchmarks/peers/gloo_collectives.py'");
    }
  }
  if (!launched_world_size()) {
    return run_self_on_ranks(options.ranks);
  }
  std::vector<BenchRow> rows;
  bool first = false;
  {
    const World world = init();
    first = world.rank() == 0;
    rows = run_collectives_bench(world, {.seconds = options.seconds});
  }
  if (first) {
    report(options, std::move(rows));
  }
  return 0;
}

} // namespace tessera::cli
