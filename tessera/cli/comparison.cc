// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/compare.h>
#include <tessera/cli/table.h>

#include <cmath>
#include <functional>
#include <string_view>

namespace tessera::cli {
namespace {

// One line of the comparison: a number per mode.
struct Measure {
  std::string name; // as in rows: "tokens_per_s"
  std::string title; // as in the table
  std::string unit;
  std::function<double(const ModeResult&)> value;
  std::function<std::string(const ModeResult&)> text;
};

std::string ms_text(double seconds) {
  return fmt::format("{:.1f}", seconds * 1e3);
}

Measure seconds_measure(
    const char* name, const char* title, double StepSeconds::*part) {
  return {
      name,
      title,
      "ms",
      [part](const ModeResult& r) { return r.step.*part * 1e3; },
      [part](const ModeResult& r) { return ms_text(r.step.*part); }};
}

Measure loss_measure(
    std::string name, std::string title, double ModeResult::*loss) {
  return {
      std::move(name),
      std::move(title),
      "nats",
      [loss](const ModeResult& r) { return r.*loss; },
      [loss](const ModeResult& r) { return fmt::format("{:.6f}", r.*loss); }};
}

Measure memory_measure(
    const char* name, const char* title, double ModeResult::*mib) {
  return {
      name,
      title,
      "MiB",
      [mib](const ModeResult& r) { return r.*mib; },
      [mib](const ModeResult& r) {
        return r.*mib > 0 ? fmt::format("{:.1f}", r.*mib) : "?";
      }};
}

KindUse use_of(const ModeResult& result, CollectiveKind kind) {
  const auto found = result.use.find(kind);
  return found == result.use.end() ? KindUse{} : found->second;
}

double mib(int64_t bytes) {
  return static_cast<double>(bytes) / 0x1p20;
}

void add_collectives(
    const std::vector<ModeResult>& results, std::vector<Measure>& measures) {
  for (const auto& [kind, unused] : results.front().use) {
    bool used = false;
    for (const ModeResult& result : results) {
      used = used || use_of(result, kind).count > 0;
    }
    if (!used) {
      continue;
    }
    const std::string name(name_of(kind));
    const CollectiveKind k = kind;
    measures.push_back(
        {name + "_count",
         name + " per step",
         "count",
         [k](const ModeResult& r) {
           return static_cast<double>(use_of(r, k).count);
         },
         [k](const ModeResult& r) {
           return std::to_string(use_of(r, k).count);
         }});
    measures.push_back(
        {name + "_volume",
         name + ", MiB per step",
         "MiB",
         [k](const ModeResult& r) { return mib(use_of(r, k).bytes); },
         [k](const ModeResult& r) {
           return fmt::format("{:.2f}", mib(use_of(r, k).bytes));
         }});
  }
}

std::vector<Measure> measures_of(const std::vector<ModeResult>& results) {
  const double reference = results.front().tokens_per_s;
  std::vector<Measure> measures = {
      {"tokens_per_s",
       "tokens/s",
       "tokens/s",
       [](const ModeResult& r) { return r.tokens_per_s; },
       [](const ModeResult& r) { return with_commas(r.tokens_per_s); }},
      {"", // the rows have ratios of their own
       "ratio to " + results.front().name,
       "",
       {},
       [reference](const ModeResult& r) {
         return fmt::format("{:.3f}", r.tokens_per_s / reference);
       }},
      seconds_measure("step", "ms per step", &StepSeconds::total),
      seconds_measure(
          "forward_backward",
          "  forward + backward",
          &StepSeconds::forward_backward),
      seconds_measure(
          "communication", "  communication", &StepSeconds::communication),
      seconds_measure("optimizer", "  optimizer", &StepSeconds::optimizer),
      seconds_measure(
          "communication_hidden",
          "hidden communication",
          &StepSeconds::hidden)};
  add_collectives(results, measures);
  measures.push_back(memory_measure(
      "peak_memory", "peak memory of a rank, MiB", &ModeResult::peak_mib));
  measures.push_back(memory_measure(
      "optimizer_state",
      "optimizer state of a rank, MiB",
      &ModeResult::state_mib));
  measures.push_back(loss_measure(
      fmt::format("loss_at_{}", kEarlyStep),
      fmt::format("loss at step {}", kEarlyStep),
      &ModeResult::early_loss));
  measures.push_back(
      loss_measure("final_loss", "final loss", &ModeResult::final_loss));
  return measures;
}

} // namespace

std::string comparison_table(const std::vector<ModeResult>& results) {
  std::vector<std::string> head = {""};
  for (const ModeResult& result : results) {
    head.push_back(result.name);
  }
  Table table(head);
  for (const Measure& measure : measures_of(results)) {
    std::vector<std::string> row = {measure.title};
    for (const ModeResult& result : results) {
      row.push_back(measure.text(result));
    }
    table.add(row);
  }
  return table.str();
}

std::vector<BenchRow> comparison_rows(const std::vector<ModeResult>& results) {
  std::vector<BenchRow> rows;
  const ModeResult& reference = results.front();
  for (const ModeResult& result : results) {
    for (const Measure& measure : measures_of(results)) {
      if (!measure.value) {
        continue;
      }
      const double value = measure.value(result);
      const bool is_reference = &result == &reference;
      const std::string against =
          is_reference ? "" : "train/" + reference.name + "/" + measure.name;
      rows.push_back(
          {"train/" + result.name + "/" + measure.name,
           value,
           measure.unit,
           against,
           value / measure.value(reference)});
    }
  }
  return rows;
}

} // namespace tessera::cli
