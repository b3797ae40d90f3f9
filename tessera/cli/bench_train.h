// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>
#include <tessera/cli/sync_modes.h>
#include <tessera/cli/train_blocks.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::cli {

struct BenchTrainOptions {
  // NAME:ROWSxTOKENS per rank and step; without sizes 8x128.
  std::vector<std::string> models = {"llama-3m:8x128", "llama-19m:2x64"};
  // Of `tessera train`: an option of --sync, or NAME=OPTIONS.
  std::vector<std::string> modes = sync_options();
  std::vector<std::string> backends = {"shm", "gloo"};
  std::vector<std::string> peers; // NAME=COMMAND, see train_blocks.h
  std::string peers_alone; // command of their copies; empty: each its own
  int64_t ranks = 2;
  int64_t pairs = 20;
  int64_t steps = 5; // of a block
  std::string data; // a text; empty: random words
  std::string json; // file for the rows; empty: none
};

// What is trained.
struct BenchModel {
  std::string model; // a preset or a JSON file
  int64_t batch = 8; // rows per rank
  int64_t sequence = 128;
};

// One way to train: ours in a mode over a backend, or a peer.
struct Contestant {
  std::string name; // "shm/reduce-scatter", "ddp"
  bool peer = false;
  std::vector<std::string> command = {}; // of a rank
  std::vector<std::string> alone = {}; // of an independent copy
};

struct ContestantResult {
  std::string name;
  bool peer = false;
  double tokens_per_s = 0; // of all ranks, in the best block
  BlockReport step; // the best block's slowest rank, times per step
  double alone_tokens_per_s = 0; // of as many copies, in their best block
  double alone_forward_backward = 0; // per step; the least
  double efficiency = 0; // median over the pairs of ranks / copies in tokens/s
};

// Trains the models in every way, in turns, and prints who does it how fast;
// the programs live all the while, and only one way's processes are awake at a
// time. Each turn is a pair: a block on the ranks and one on as many
// independent copies of the same program. Returns the exit code. Throws
// UsageError for options that make no sense, IoError for a program that fails.
int run_bench_train(const BenchTrainOptions& options);

BenchModel parse_bench_model(const std::string& text); // throws UsageError

// Ours first. Throws UsageError.
std::vector<Contestant> contestants_of(const BenchTrainOptions& options);

// `arguments` go to every command. Progress goes to `out`.
std::vector<ContestantResult> run_match(
    const std::vector<Contestant>& contestants,
    const std::vector<std::string>& arguments,
    const BenchModel& model,
    const BenchTrainOptions& options,
    std::ostream& out);

// The table of results, and their rows, named train/<model>/<contestant>/...;
// ratios are against the peer with the most tokens/s, if there is one.
std::string match_table(const std::vector<ContestantResult>& results);
std::vector<BenchRow> match_rows(
    const std::string& model, const std::vector<ContestantResult>& results);

} // namespace tessera::cli
