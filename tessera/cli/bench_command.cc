// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/bench_collectives.h>
#include <tessera/cli/bench_command.h>
#include <tessera/cli/bench_train.h>
#include <tessera/cli/number_option.h>
#include <tessera/cli/table.h>
#include <tessera/dtensor/dispatch_bench.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::cli {
namespace {

// "dispatch/world1/grad/mm/plain" -> the part before the last '/' and the rest.
std::pair<std::string, std::string> split_name(const std::string& name) {
  const size_t slash = name.rfind('/');
  return slash == std::string::npos
      ? std::pair{name, std::string("value")}
      : std::pair{name.substr(0, slash), name.substr(slash + 1)};
}

// One line per case, its plain time, its distributed time and the difference
// beside each other.
std::string dispatch_table(const std::vector<BenchRow>& rows) {
  std::vector<std::string> order;
  std::map<std::string, std::map<std::string, std::string>> cells;
  for (const BenchRow& row : rows) {
    const auto [what, column] = split_name(row.name);
    if (cells.find(what) == cells.end()) {
      order.push_back(what);
    }
    cells[what][column] = fmt::format("{:.3f}", row.value);
  }
  Table table({"us per call", "plain", "distributed", "difference"});
  std::vector<std::string> others;
  for (const std::string& what : order) {
    auto& line = cells[what];
    if (line.count("difference") == 0) {
      for (const auto& [column, value] : line) {
        others.push_back(fmt::format("{}/{}: {} us\n", what, column, value));
      }
      continue;
    }
    table.add({what, line["plain"], line["distributed"], line["difference"]});
  }
  std::string text = table.str();
  for (const std::string& other : others) {
    text += other;
  }
  return text;
}

void declare_collectives(CLI::App& bench, int& exit_code) {
  CLI::App* const collectives = bench.add_subcommand(
      "collectives",
      "Time of the collectives by size, over every backend of this machine");
  const auto options = std::make_shared<BenchCollectivesOptions>();
  collectives->add_option("--ranks", options->ranks, "Processes it starts")
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  collectives->add_option("--seconds", options->seconds, "Time for one row")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  collectives->add_option(
      "--peer",
      options->peers,
      "NAME=COMMAND: another library's program that prints its rows");
  collectives->add_option(
      "--json", options->json, "File that gets the benchmark rows");
  collectives->add_option(
      "--plot", options->plot, "File that gets the picture (SVG)");
  collectives->callback(
      [options, &exit_code] { exit_code = run_bench_collectives(*options); });
}

void declare_match_options(CLI::App& train, BenchTrainOptions& options) {
  train.add_option("--ranks", options.ranks, "Ranks, and copies beside them")
      ->check(whole_number(1, 64))
      ->capture_default_str();
  train
      .add_option(
          "--pairs",
          options.pairs,
          "Blocks on the ranks, each beside one on independent copies")
      ->check(whole_number(1))
      ->capture_default_str();
  train.add_option("--steps", options.steps, "Steps of a block")
      ->check(whole_number(1))
      ->capture_default_str();
  train.add_option("--data", options.data, "A text [random words]")
      ->check(CLI::ExistingFile);
  train.add_option("--json", options.json, "File that gets the benchmark rows");
}

void declare_train(CLI::App& bench, int& exit_code) {
  CLI::App* const train = bench.add_subcommand(
      "train",
      "Training speed of every mode and of other libraries, in turns, against "
      "independent one-rank copies");
  const auto options = std::make_shared<BenchTrainOptions>();
  train
      ->add_option(
          "--model",
          options->models,
          "NAME:ROWSxTOKENS of a rank and step; several: one after another")
      ->capture_default_str();
  train
      ->add_option(
          "--mode",
          options->modes,
          "An option of `tessera train --sync`, or NAME='options of tessera "
          "train'")
      ->capture_default_str();
  train->add_option("--backend", options->backends, "Of the collectives")
      ->check(CLI::IsMember({"shm", "gloo"}))
      ->capture_default_str();
  train->add_option(
      "--peer",
      options->peers,
      "NAME=COMMAND: another library's program that trains when told");
  train->add_option(
      "--peers-alone",
      options->peers_alone,
      "COMMAND of the peers' independent copies [each its own]");
  declare_match_options(*train, *options);
  train->callback(
      [options, &exit_code] { exit_code = run_bench_train(*options); });
}

} // namespace

void declare_bench_command(CLI::App& app, int& exit_code) {
  CLI::App* const bench = app.add_subcommand("bench", "Benchmarks");
  bench->require_subcommand(1);
  declare_collectives(*bench, exit_code);
  declare_train(*bench, exit_code);
  CLI::App* const dispatch = bench->add_subcommand(
      "dispatch", "What a distributed operator costs over the plain one");
  const auto json = std::make_shared<std::string>();
  const auto options = std::make_shared<DispatchBenchOptions>();
  dispatch->add_option("--json", *json, "File that gets the benchmark rows");
  dispatch->add_option("--calls", options->calls, "Calls in one timed run")
      ->check(whole_number(1))
      ->capture_default_str();
  dispatch
      ->add_option("--runs", options->runs, "Timed runs; the least is taken")
      ->check(whole_number(1))
      ->capture_default_str();
  dispatch->callback([json, options, &exit_code] {
    const std::vector<BenchRow> rows = run_dispatch_bench(*options);
    std::cout << dispatch_table(rows);
    if (!json->empty()) {
      write_json(rows, *json);
    }
    exit_code = 0;
  });
}

} // namespace tessera::cli
