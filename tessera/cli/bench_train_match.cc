// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/bench_train.h>
#include <tessera/cli/train_workers.h>

#include <algorithm>
#include <map>
#include <memory>
#include <ostream>
#include <utility>

namespace tessera::cli {
namespace {

constexpr int64_t kWarmUp = 3; // steps, before anything is measured
constexpr int64_t kWakeUp = 1; // before each block: caches are others' by then

// A contestant in the match: its processes and what has been seen of them.
struct Player {
  ContestantResult result;
  std::shared_ptr<TrainWorkers> ranks;
  std::shared_ptr<TrainWorkers> copies;
  std::vector<double> efficiencies;
};

class Match {
 public:
  Match(
      const BenchModel& model,
      const BenchTrainOptions& options,
      const std::vector<std::string>& arguments)
      : options_(options),
        arguments_(arguments),
        tokens_(static_cast<double>(model.batch * model.sequence)) {}

  void add(const Contestant& contestant) {
    Player player;
    player.result.name = contestant.name;
    player.result.peer = contestant.peer;
    player.ranks =
        start(contestant.name, contestant.command, WorkersAre::kOneJob);
    // One set of copies serves all contestants that are alike when alone.
    auto& copies = copies_[contestant.alone];
    if (!copies) {
      copies =
          start(contestant.name, contestant.alone, WorkersAre::kIndependent);
    }
    player.copies = copies;
    players_.push_back(std::move(player));
  }

  // Returns the number of parameters, the same everywhere.
  int64_t await_ready() {
    int64_t parameters = -1;
    for (TrainWorkers* workers : all()) {
      const int64_t here = workers->await_ready();
      if (parameters >= 0 && here != parameters) {
        throw IoError(fmt::format(
            "bench train: {} has a model of {} parameters, the others of {}",
            name_of(workers),
            here,
            parameters));
      }
      parameters = here;
      workers->run(kWarmUp);
    }
    return parameters;
  }

  // The order turns from pair to pair, so that none always follows the same
  // other.
  void run_pair(int64_t pair) {
    const auto first = static_cast<size_t>(pair);
    for (size_t i = 0; i < players_.size(); ++i) {
      Player& player = players_[(i + first) % players_.size()];
      double ranks = 0;
      double copies = 0;
      if (pair % 2 == 0) {
        ranks = run_ranks(player);
        copies = run_copies(player);
      } else {
        copies = run_copies(player);
        ranks = run_ranks(player);
      }
      player.efficiencies.push_back(ranks / copies);
    }
  }

  std::vector<ContestantResult> results() const {
    std::vector<ContestantResult> results;
    for (const Player& player : players_) {
      results.push_back(player.result);
      std::vector<double> all = player.efficiencies;
      const auto middle =
          all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
      std::nth_element(all.begin(), middle, all.end());
      results.back().efficiency = *middle;
    }
    return results;
  }

 private:
  std::shared_ptr<TrainWorkers> start(
      const std::string& name,
      std::vector<std::string> command,
      WorkersAre are) const {
    command.insert(command.end(), arguments_.begin(), arguments_.end());
    return std::make_shared<TrainWorkers>(name, command, options_.ranks, are);
  }

  std::vector<TrainWorkers*> all() const {
    std::vector<TrainWorkers*> all;
    for (const Player& player : players_) {
      all.push_back(player.ranks.get());
    }
    for (const auto& [command, copies] : copies_) {
      all.push_back(copies.get());
    }
    return all;
  }

  std::string name_of(const TrainWorkers* workers) const {
    for (const Player& player : players_) {
      if (player.ranks.get() == workers || player.copies.get() == workers) {
        return player.result.name;
      }
    }
    return "?";
  }

  std::vector<BlockReport> block(TrainWorkers& workers) const {
    workers.run(kWakeUp);
    std::vector<BlockReport> reports = workers.run(options_.steps);
    const auto steps = static_cast<double>(options_.steps);
    for (BlockReport& report : reports) {
      report.seconds /= steps;
      report.forward_backward /= steps;
      report.communication /= steps;
      report.optimizer /= steps;
      report.hidden /= steps;
    }
    return reports;
  }

  // Both return tokens/s.

  double run_ranks(Player& player) const {
    const std::vector<BlockReport> reports = block(*player.ranks);
    const auto count = static_cast<double>(reports.size());
    BlockReport slowest = *std::ranges::max_element(
        reports, {}, [](const BlockReport& r) { return r.seconds; });
    slowest.loss = 0;
    for (const BlockReport& report : reports) {
      slowest.loss += report.loss / count;
      slowest.peak_mib = std::max(slowest.peak_mib, report.peak_mib);
    }
    const double tokens_per_s = tokens_ * count / slowest.seconds;
    ContestantResult& result = player.result;
    if (tokens_per_s > result.tokens_per_s) {
      result.tokens_per_s = tokens_per_s;
      result.step = slowest;
    }
    result.step.loss = slowest.loss; // the last ones
    result.step.peak_mib = slowest.peak_mib;
    return tokens_per_s;
  }

  double run_copies(Player& player) const {
    const std::vector<BlockReport> reports = block(*player.copies);
    double tokens_per_s = 0;
    double forward_backward = 0;
    for (const BlockReport& report : reports) {
      tokens_per_s += tokens_ / report.seconds;
      forward_backward +=
          report.forward_backward / static_cast<double>(reports.size());
    }
    ContestantResult& result = player.result;
    result.alone_tokens_per_s =
        std::max(result.alone_tokens_per_s, tokens_per_s);
    result.alone_forward_backward = result.alone_forward_backward == 0
        ? forward_backward
        : std::min(result.alone_forward_backward, forward_backward);
    return tokens_per_s;
  }

  const BenchTrainOptions& options_;
  const std::vector<std::string>& arguments_;
  double tokens_; // of a rank and step
  std::map<std::vector<std::string>, std::shared_ptr<TrainWorkers>> copies_;
  std::vector<Player> players_;
};

} // namespace

std::vector<ContestantResult> run_match(
    const std::vector<Contestant>& contestants,
    const std::vector<std::string>& arguments,
    const BenchModel& model,
    const BenchTrainOptions& options,
    std::ostream& out) {
  Match match(model, options, arguments);
  for (const Contestant& contestant : contestants) {
    match.add(contestant);
  }
  const int64_t parameters = match.await_ready();
  out << fmt::format(
             "{}: {} parameters; {} ranks with one thread each, {} rows of {} "
             "tokens per rank; best of {} blocks of {} steps\n",
             model.model,
             parameters,
             options.ranks,
             model.batch,
             model.sequence,
             options.pairs,
             options.steps)
      << std::flush;
  for (int64_t pair = 0; pair < options.pairs; ++pair) {
    match.run_pair(pair);
    out << fmt::format("pair {}/{}:", pair + 1, options.pairs);
    for (const ContestantResult& result : match.results()) {
      out << fmt::format(" {} {:.0f}", result.name, result.tokens_per_s);
    }
    out << std::endl;
  }
  return match.results();
}

} // namespace tessera::cli
