// SPDX-License-Identifier: Apache-2.0
#include <tessera/comm/record.h>
#include <nlohmann/json.hpp>

#include <array>

namespace tessera {
namespace {

// Single events beyond this are forgotten, oldest first; the sums stay exact.
constexpr std::size_t kMaxEvents = std::size_t{1} << 16;

thread_local const char* current_asker = "";

} // namespace

std::string_view name_of(CollectiveKind kind) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "all_reduce",
      "reduce_scatter",
      "all_gather",
      "all_to_all",
      "broadcast",
      "send",
      "recv",
      "barrier"};
  return kNames.at(static_cast<std::size_t>(kind));
}

uint64_t Record::add(CollectiveEvent event) {
  const std::scoped_lock lock(mutex_);
  Totals& totals = totals_[Key{event.kind, event.axis, event.asker}];
  totals.count += 1;
  totals.bytes += event.bytes;
  totals.seconds += event.seconds;
  events_.push_back(std::move(event));
  if (events_.size() > kMaxEvents) {
    events_.pop_front();
    ++first_ticket_;
  }
  return first_ticket_ + events_.size() - 1;
}

void Record::add_seconds(uint64_t ticket, double seconds) {
  const std::scoped_lock lock(mutex_);
  if (ticket < first_ticket_) {
    return;
  }
  CollectiveEvent& event = events_.at(ticket - first_ticket_);
  event.seconds += seconds;
  totals_[Key{event.kind, event.axis, event.asker}].seconds += seconds;
}

void Record::reset() {
  const std::scoped_lock lock(mutex_);
  first_ticket_ += events_.size();
  events_.clear();
  totals_.clear();
}

Record::Totals Record::sum(
    std::optional<CollectiveKind> kind,
    std::string_view axis,
    std::string_view asker) const {
  const std::scoped_lock lock(mutex_);
  Totals sum;
  for (const auto& [key, totals] : totals_) {
    const bool matches = (!kind || key.kind == *kind) &&
        (axis.empty() || key.axis == axis) &&
        (asker.empty() || key.asker == asker);
    if (matches) {
      sum.count += totals.count;
      sum.bytes += totals.bytes;
      sum.seconds += totals.seconds;
    }
  }
  return sum;
}

int64_t Record::count(
    CollectiveKind kind, std::string_view axis, std::string_view asker) const {
  return sum(kind, axis, asker).count;
}

int64_t Record::bytes(
    CollectiveKind kind, std::string_view axis, std::string_view asker) const {
  return sum(kind, axis, asker).bytes;
}

int64_t Record::total_count() const {
  return sum(std::nullopt, {}, {}).count;
}

double Record::seconds() const {
  return sum(std::nullopt, {}, {}).seconds;
}

std::vector<CollectiveEvent> Record::events() const {
  const std::scoped_lock lock(mutex_);
  return {events_.begin(), events_.end()};
}

std::string Record::json() const {
  const std::scoped_lock lock(mutex_);
  int64_t events = 0;
  nlohmann::json by_kind = nlohmann::json::object();
  std::map<std::pair<CollectiveKind, std::string>, Totals> by_axis;
  for (const auto& [key, totals] : totals_) {
    Totals& sum = by_axis[{key.kind, key.axis}];
    sum.count += totals.count;
    sum.bytes += totals.bytes;
    sum.seconds += totals.seconds;
    events += totals.count;
  }
  for (const auto& [key, sum] : by_axis) {
    by_kind[std::string(name_of(key.first))][key.second] = {
        {"count", sum.count}, {"bytes", sum.bytes}, {"seconds", sum.seconds}};
  }
  return nlohmann::json{{"events", events}, {"by_kind", by_kind}}.dump();
}

AskerScope::AskerScope(const char* name) : previous_(current_asker) {
  current_asker = name;
}

AskerScope::~AskerScope() {
  current_asker = previous_;
}

const char* AskerScope::current() {
  return current_asker;
}

} // namespace tessera
