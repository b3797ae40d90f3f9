// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/record_impl.h>

#include <array>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

// Single events beyond this are forgotten, oldest first; the sums stay exact.
constexpr std::size_t kMaxEvents = std::size_t{1} << 16;

// Failures that follow one another faster than this share a file.
constexpr auto kBetweenFiles = std::chrono::seconds(1);

thread_local const char* current_asker = "";

double seconds_between(
    RecordImpl::Clock::time_point start, RecordImpl::Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

double microseconds_of(RecordImpl::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

} // namespace

std::string_view name_of(CollectiveKind kind) {
  static constexpr std::array<std::string_view, 9> kNames = {
      "all_reduce",
      "reduce_scatter",
      "all_gather",
      "all_to_all",
      "broadcast",
      "send",
      "recv",
      "barrier",
      "with_peers"};
  return kNames.at(static_cast<std::size_t>(kind));
}

void RecordImpl::set_owner(FlightOwner owner) {
  const std::scoped_lock lock(mutex_);
  flight_.owner = std::move(owner);
}

uint32_t RecordImpl::add_group(FlightGroup group) {
  const std::scoped_lock lock(mutex_);
  return flight_.add_group(std::move(group));
}

RecordImpl::Ticket RecordImpl::begin(
    uint32_t group,
    const CallDescription& call,
    int32_t tag,
    Clock::time_point start) {
  const std::scoped_lock lock(mutex_);
  return {.call = flight_.begin(group, call, tag, start)};
}

void RecordImpl::issued(
    Ticket& ticket,
    uint32_t group,
    CollectiveKind kind,
    int64_t bytes,
    Clock::time_point start,
    bool done) {
  const auto now = Clock::now();
  const std::scoped_lock lock(mutex_);
  ticket.event = add_locked(
      {kind, flight_.groups()[group].name, AskerScope::current()},
      bytes,
      seconds_between(start, now),
      start);
  if (done) {
    flight_.end(ticket.call, CallState::kCompleted, now);
  }
}

void RecordImpl::waited(
    const Ticket& ticket, Clock::time_point start, double busy, bool done) {
  const auto now = Clock::now();
  const double blocked = seconds_between(start, now);
  const std::scoped_lock lock(mutex_);
  add_seconds_locked(ticket.event, blocked);
  if (busy > 0) {
    hidden_seconds_ += busy - blocked;
  }
  if (done) {
    flight_.end(ticket.call, CallState::kCompleted, now);
  }
}

void RecordImpl::ended(const Ticket& ticket, CallState state) {
  const auto now = Clock::now();
  const std::scoped_lock lock(mutex_);
  flight_.end(ticket.call, state, now);
}

std::string RecordImpl::failed(
    const Ticket& ticket, const std::string& reason) {
  const auto now = Clock::now();
  std::string text;
  FlightOwner owner;
  {
    const std::scoped_lock lock(mutex_);
    flight_.end(ticket.call, CallState::kFailed, now);
    if (!failed_file_.empty() && now - failed_at_ < kBetweenFiles) {
      return failed_file_;
    }
    text = flight_json(flight_, reason);
    owner = flight_.owner;
  }
  std::string file;
  try {
    file = fmt::format(
        "this rank's last calls are in {}, to be compared by `tessera comm "
        "dump`",
        write_flight_file(owner, text));
  } catch (const IoError& error) {
    file = fmt::format(
        "this rank's last calls could not be written: {}", error.what());
  }
  const std::scoped_lock lock(mutex_);
  failed_file_ = file;
  failed_at_ = now;
  return file;
}

uint64_t RecordImpl::add_locked(
    const KeyView& key,
    int64_t bytes,
    double seconds,
    Clock::time_point start) {
  auto found = totals_.find(key);
  if (found == totals_.end()) {
    found =
        totals_
            .emplace(
                Key{key.kind, std::string(key.axis), std::string(key.asker)},
                Totals{})
            .first;
  }
  found->second.count += 1;
  found->second.bytes += bytes;
  found->second.seconds += seconds;
  const Event event{&*found, bytes, seconds, start};
  if (events_.size() < kMaxEvents) {
    events_.push_back(event);
  } else {
    events_[next_event_ % kMaxEvents] = event;
    ++first_event_;
  }
  return next_event_++;
}

uint64_t RecordImpl::add(
    CollectiveKind kind,
    std::string_view axis,
    std::string_view asker,
    int64_t bytes,
    double seconds,
    Clock::time_point start) {
  const std::scoped_lock lock(mutex_);
  return add_locked({kind, axis, asker}, bytes, seconds, start);
}

void RecordImpl::add_seconds_locked(uint64_t event, double seconds) {
  if (event < first_event_) {
    return;
  }
  Event& kept = events_[event % kMaxEvents];
  kept.seconds += seconds;
  kept.totals->second.seconds += seconds;
}

void RecordImpl::add_seconds(uint64_t event, double seconds) {
  const std::scoped_lock lock(mutex_);
  add_seconds_locked(event, seconds);
}

// Numbers go on, so that tickets from before stay recognisable; the next one is
// a multiple of the ring's length, so that it lands in the first place again.
void RecordImpl::reset() {
  const std::scoped_lock lock(mutex_);
  next_event_ = (next_event_ + kMaxEvents - 1) / kMaxEvents * kMaxEvents;
  first_event_ = next_event_;
  events_.clear();
  totals_.clear();
}

RecordImpl::Totals RecordImpl::sum(
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

template <typename Visit>
void RecordImpl::visit_events(const Visit& visit) const {
  for (uint64_t i = first_event_; i < next_event_; ++i) {
    visit(events_[i % kMaxEvents]);
  }
}

double RecordImpl::hidden_seconds() const {
  const std::scoped_lock lock(mutex_);
  return hidden_seconds_;
}

std::vector<CollectiveEvent> RecordImpl::events() const {
  const std::scoped_lock lock(mutex_);
  std::vector<CollectiveEvent> events;
  visit_events([&](const Event& event) {
    const Key& key = event.totals->first;
    events.push_back(
        {.kind = key.kind,
         .axis = key.axis,
         .bytes = event.bytes,
         .seconds = event.seconds,
         .asker = key.asker});
  });
  return events;
}

std::string RecordImpl::json() const {
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

std::string RecordImpl::chrome_trace() const {
  const std::scoped_lock lock(mutex_);
  using Ordered = nlohmann::ordered_json;
  const int64_t rank = flight_.owner.rank;
  const auto offset = std::chrono::system_clock::now().time_since_epoch() -
      Clock::now().time_since_epoch();
  Ordered events = Ordered::array();
  events.push_back(
      {{"ph", "M"},
       {"name", "process_name"},
       {"pid", rank},
       {"args", {{"name", fmt::format("rank {}", rank)}}}});
  std::map<std::string_view, std::size_t> tracks;
  visit_events([&](const Event& event) {
    const Key& key = event.totals->first;
    const auto [track, fresh] = tracks.emplace(key.axis, tracks.size());
    if (fresh) {
      events.push_back(
          {{"ph", "M"},
           {"name", "thread_name"},
           {"pid", rank},
           {"tid", track->second},
           {"args", {{"name", key.axis}}}});
    }
    events.push_back(
        {{"ph", "X"},
         {"name", name_of(key.kind)},
         {"pid", rank},
         {"tid", track->second},
         {"ts", microseconds_of(event.start.time_since_epoch() + offset)},
         {"dur", event.seconds * 1e6},
         {"args", {{"bytes", event.bytes}, {"asker", key.asker}}}});
  });
  return Ordered{{"traceEvents", std::move(events)}}.dump();
}

std::string RecordImpl::write_calls(const std::string& reason) const {
  std::string text;
  FlightOwner owner;
  {
    const std::scoped_lock lock(mutex_);
    text = flight_json(flight_, reason);
    owner = flight_.owner;
  }
  return write_flight_file(owner, text);
}

Record::Record() : impl_(std::make_unique<RecordImpl>()) {}
Record::~Record() = default;

uint64_t Record::add(const CollectiveEvent& event) {
  return impl_->add(
      event.kind,
      event.axis,
      event.asker,
      event.bytes,
      event.seconds,
      RecordImpl::Clock::now());
}

void Record::add_seconds(uint64_t ticket, double seconds) {
  impl_->add_seconds(ticket, seconds);
}

void Record::reset() {
  impl_->reset();
}

int64_t Record::count(
    CollectiveKind kind, std::string_view axis, std::string_view asker) const {
  return impl_->sum(kind, axis, asker).count;
}

int64_t Record::bytes(
    CollectiveKind kind, std::string_view axis, std::string_view asker) const {
  return impl_->sum(kind, axis, asker).bytes;
}

int64_t Record::total_count() const {
  return impl_->sum(std::nullopt, {}, {}).count;
}

double Record::seconds() const {
  return impl_->sum(std::nullopt, {}, {}).seconds;
}

std::vector<CollectiveEvent> Record::events() const {
  return impl_->events();
}

std::string Record::json() const {
  return impl_->json();
}

std::string Record::chrome_trace() const {
  return impl_->chrome_trace();
}

std::string Record::write_calls(const std::string& reason) const {
  return impl_->write_calls(reason);
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
