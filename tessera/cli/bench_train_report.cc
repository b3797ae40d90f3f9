// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/bench_train.h>
#include <tessera/cli/table.h>

#include <algorithm>
#include <array>

namespace tessera::cli {
namespace {

using Result = ContestantResult;

const Result* best_peer(const std::vector<Result>& results) {
  const Result* best = nullptr;
  for (const Result& result : results) {
    if (result.peer &&
        (best == nullptr || result.tokens_per_s > best->tokens_per_s)) {
      best = &result;
    }
  }
  return best;
}

// What the step takes beyond the forward and backward of a copy that shares its
// machine with as many others: reduce, clip, update, gather, as far as it is
// not hidden.
double outside(const Result& result) {
  return result.step.seconds - result.alone_forward_backward;
}

struct Measure {
  const char* name; // in rows
  const char* title; // in the table
  const char* unit;
  int digits;
  double (*value)(const Result&);
};

constexpr std::array<Measure, 12> kMeasures = {{
    {"tokens_per_s",
     "tokens/s",
     "tokens/s",
     0,
     [](const Result& r) { return r.tokens_per_s; }},
    {"alone_tokens_per_s",
     "copies'",
     "tokens/s",
     0,
     [](const Result& r) { return r.alone_tokens_per_s; }},
    {"efficiency",
     "efficiency %",
     "%",
     1,
     [](const Result& r) { return 100 * r.efficiency; }},
    {"step",
     "ms/step",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.step.seconds; }},
    {"forward_backward",
     "fwd+bwd",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.step.forward_backward; }},
    {"communication_exposed",
     "exposed",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.step.communication; }},
    {"communication_hidden",
     "hidden",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.step.hidden; }},
    {"optimizer",
     "optimizer",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.step.optimizer; }},
    {"alone_forward_backward",
     "copies' fwd+bwd",
     "ms",
     1,
     [](const Result& r) { return 1e3 * r.alone_forward_backward; }},
    {"outside",
     "outside it",
     "ms",
     1,
     [](const Result& r) { return 1e3 * outside(r); }},
    {"peak_memory",
     "MiB",
     "MiB",
     0,
     [](const Result& r) { return r.step.peak_mib; }},
    {"loss", "loss", "nats", 3, [](const Result& r) { return r.step.loss; }},
}};

std::string text_of(const Measure& measure, const Result& result) {
  const double value = measure.value(result);
  return measure.digits == 0 ? with_commas(value)
                             : fmt::format("{:.{}f}", value, measure.digits);
}

} // namespace

std::string match_table(const std::vector<Result>& results) {
  const Result* const peer = best_peer(results);
  std::vector<std::string> head = {""};
  for (const Measure& measure : kMeasures) {
    head.emplace_back(measure.title);
  }
  if (peer != nullptr) {
    head.insert(head.begin() + 2, "to " + peer->name);
  }
  Table table(head);
  for (const Result& result : results) {
    std::vector<std::string> line = {result.name};
    for (const Measure& measure : kMeasures) {
      line.push_back(text_of(measure, result));
    }
    if (peer != nullptr) {
      line.insert(
          line.begin() + 2,
          fmt::format("{:.2f}x", result.tokens_per_s / peer->tokens_per_s));
    }
    table.add(line);
  }
  return table.str();
}

std::vector<BenchRow> match_rows(
    const std::string& model, const std::vector<Result>& results) {
  const Result* const peer = best_peer(results);
  std::vector<BenchRow> rows;
  for (const Result& result : results) {
    for (const Measure& measure : kMeasures) {
      const auto name = [&](const Result& of) {
        return fmt::format("train/{}/{}/{}", model, of.name, measure.name);
      };
      BenchRow row{name(result), measure.value(result), measure.unit, "", 0};
      if (peer != nullptr && peer != &result) {
        row.against = name(*peer);
        row.ratio = row.value / measure.value(*peer);
      }
      rows.push_back(row);
    }
  }
  return rows;
}

} // namespace tessera::cli
