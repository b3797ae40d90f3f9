// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/text.h>
#include <tessera/cli/comm_command.h>
#include <tessera/cli/table.h>
#include <tessera/comm/flight_merge.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

// Nanoseconds since the epoch as "12:34:56.789012", UTC.
std::string time_of_day(int64_t ns) {
  const auto since = std::chrono::nanoseconds(ns);
  const auto day = std::chrono::floor<std::chrono::days>(since);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(since - day);
  const std::chrono::hh_mm_ss time(micros);
  return fmt::format(
      "{:02}:{:02}:{:02}.{:06}",
      time.hours().count(),
      time.minutes().count(),
      time.seconds().count(),
      time.subseconds().count());
}

std::string heading(const FlightDifference& difference) {
  return fmt::format(
      "group {} {}, seq {}: {}\n",
      difference.group,
      bracketed(difference.world_ranks),
      difference.seq,
      difference.what);
}

std::string table_of(const FlightDifference& difference) {
  Table table({"rank", "state", "began (UTC)", "asked by", "call"});
  for (const FlightPlace& place : difference.places) {
    const std::string rank = std::to_string(place.rank);
    if (place.call.empty()) {
      table.add({rank, "-", "-", "-", place.remark});
    } else {
      table.add(
          {rank,
           std::string(name_of(*place.state)),
           time_of_day(place.start_ns),
           place.asker.empty() ? "-" : place.asker,
           place.call});
    }
  }
  return table.str();
}

std::string text_of(const FlightReport& report) {
  std::string text = fmt::format(
      "job {}: {} of {} ranks' files\n",
      report.job,
      report.size - static_cast<int64_t>(report.missing.size()),
      report.size);
  if (!report.missing.empty()) {
    text += fmt::format(
        "no file of ranks {}: did they die before they could write one?\n",
        bracketed(report.missing));
  }
  if (report.differences.empty()) {
    return text + "no difference: all calls match and have ended well\n";
  }
  text += "\nfirst difference: " + heading(report.differences[0]) +
      table_of(report.differences[0]);
  for (std::size_t i = 1; i < report.differences.size(); ++i) {
    text += "\nlater: " + heading(report.differences[i]);
  }
  text += "\nwhy the files were written:\n";
  for (const std::string& reason : report.reasons) {
    text += "  " + reason + "\n";
  }
  return text;
}

Json json_of(const FlightDifference& difference) {
  Json places = Json::array();
  for (const FlightPlace& place : difference.places) {
    Json entry = {{"rank", place.rank}};
    if (place.call.empty()) {
      entry["remark"] = place.remark;
    } else {
      entry["call"] = place.call;
      entry["asker"] = place.asker;
      entry["state"] = name_of(*place.state);
      entry["start_ns"] = place.start_ns;
    }
    places.push_back(std::move(entry));
  }
  return {
      {"group", difference.group},
      {"ranks", difference.world_ranks},
      {"seq", difference.seq},
      {"what", difference.what},
      {"places", std::move(places)}};
}

std::string json_text(const FlightReport& report) {
  Json differences = Json::array();
  for (const FlightDifference& difference : report.differences) {
    differences.push_back(json_of(difference));
  }
  const Json all = {
      {"job", report.job},
      {"size", report.size},
      {"missing", report.missing},
      {"reasons", report.reasons},
      {"differences", std::move(differences)}};
  return all.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

} // namespace

void declare_comm_command(CLI::App& app, int& exit_code) {
  CLI::App* const comm =
      app.add_subcommand("comm", "What the ranks told each other");
  comm->require_subcommand(1);
  CLI::App* const dump = comm->add_subcommand(
      "dump", "Compare the ranks' last calls and show where they first differ");
  const auto paths = std::make_shared<std::vector<std::string>>();
  const auto json = std::make_shared<bool>(false);
  dump->add_option(
          "files", *paths, "The files that the ranks' errors named, one a rank")
      ->required();
  dump->add_flag("--json", *json, "Print JSON instead of a table");
  dump->callback([paths, json, &exit_code] {
    std::vector<FlightFile> files;
    for (const std::string& path : *paths) {
      files.push_back(read_flight_file(path));
    }
    const FlightReport report = merge_flights(files);
    std::cout << (*json ? json_text(report) : text_of(report));
    exit_code = 0;
  });
}

} // namespace tessera::cli
