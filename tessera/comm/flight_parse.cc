// SPDX-License-Identifier: Apache-2.0
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/text.h>
#include <tessera/comm/flight_merge.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::uintmax_t kMaxFileBytes = 64U << 20;
constexpr int64_t kMaxWorld = 1 << 20;
constexpr std::size_t kMaxGroups = 1 << 16;

// The values of one JSON object, each checked where it is taken.
class Fields {
 public:
  Fields(const Json& json, std::string where)
      : json_(json), where_(std::move(where)) {
    if (!json_.is_object()) {
      refuse("is no object");
    }
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw CorruptionError(fmt::format(
        "{}: {}; expected a file that a rank wrote about its calls",
        where_,
        why));
  }

  bool has(const char* name) const {
    return json_.contains(name);
  }

  const Json& at(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) {
      refuse(fmt::format("\"{}\" is missing", name));
    }
    return *found;
  }

  int64_t number(const char* name, int64_t low, int64_t high) const {
    const Json& value = at(name);
    const bool fits = value.is_number_integer() &&
        !(value.is_number_unsigned() &&
          value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
    if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
      refuse(fmt::format(
          "\"{}\" is {}, expected {} to {}", name, value.dump(), low, high));
    }
    return value.get<int64_t>();
  }

  std::string text(const char* name) const {
    const Json& value = at(name);
    if (!value.is_string()) {
      refuse(fmt::format("\"{}\" is no text", name));
    }
    std::string read = value.get<std::string>();
    for (char& c : read) { // it may reach a terminal
      c = static_cast<unsigned char>(c) < ' ' || c == '\x7f' ? ' ' : c;
    }
    return read;
  }

  const Json& list(const char* name, std::size_t most) const {
    const Json& value = at(name);
    if (!value.is_array() || value.size() > most) {
      refuse(
          fmt::format("\"{}\" is no list of at most {} entries", name, most));
    }
    return value;
  }

  std::vector<int64_t> numbers(
      const char* name, std::size_t most, int64_t low, int64_t high) const {
    std::vector<int64_t> values;
    for (const Json& value : list(name, most)) {
      const Json one = {{name, value}};
      values.push_back(Fields(one, where_).number(name, low, high));
    }
    return values;
  }

  // The value whose name is in the field. `name_at` names the values 0, 1, ...
  template <typename NameAt>
  int one_of(const char* name, int count, const NameAt& name_at) const {
    const std::string value = text(name);
    for (int i = 0; i < count; ++i) {
      if (name_at(i) == value) {
        return i;
      }
    }
    refuse(fmt::format("\"{}\" is \"{}\", which is not known", name, value));
  }

 private:
  const Json& json_;
  std::string where_;
};

constexpr int kKinds = static_cast<int>(kLastCollective) + 1;
constexpr int kOps = static_cast<int>(ReduceOp::kProduct) + 1;
constexpr int kStates = static_cast<int>(CallState::kFailed) + 1;
constexpr int kDtypes = static_cast<int>(c10::ScalarType::NumOptions);

FlightCounts counts_of(const Fields& fields, const char* name) {
  const Fields part(fields.at(name), name);
  FlightCounts counts;
  counts.size = static_cast<uint32_t>(part.number("size", 0, 2 * kMaxWorld));
  const auto first = part.numbers("first", FlightCounts::kKept, 0, INT64_MAX);
  if (first.size() != counts.kept().size()) {
    part.refuse("has more or fewer counts than it says");
  }
  std::copy(first.begin(), first.end(), counts.first.begin());
  const std::string hash = part.text("hash");
  const auto [end, error] =
      std::from_chars(hash.data(), hash.data() + hash.size(), counts.hash, 16);
  if (error != std::errc() || end != hash.data() + hash.size()) {
    part.refuse("\"hash\" is no hexadecimal number");
  }
  return counts;
}

FlightGroup group_of(const Fields& fields, const FlightOwner& owner) {
  FlightGroup group;
  group.id = fields.text("id");
  group.name = fields.text("name");
  group.world_ranks = fields.numbers(
      "ranks", static_cast<std::size_t>(owner.size), 0, owner.size - 1);
  const auto& ranks = group.world_ranks;
  const std::set<int64_t> distinct(ranks.begin(), ranks.end());
  if (distinct.size() != ranks.size() || distinct.count(owner.rank) == 0) {
    fields.refuse(fmt::format(
        "its ranks {} hold one twice or not the file's own, {}",
        bracketed(ranks),
        owner.rank));
  }
  group.calls = static_cast<uint64_t>(fields.number("calls", 0, INT64_MAX));
  return group;
}

void read_shape(const Fields& fields, FlightCall& call) {
  CallHeader& header = call.header;
  header.ndim = -1;
  if (!fields.has("shape")) {
    call.counts = counts_of(fields, "counts");
    call.out_counts = counts_of(fields, "out_counts");
    return;
  }
  const auto sizes = fields.numbers("shape", kMaxHeaderDims, 0, INT64_MAX);
  header.ndim = static_cast<int64_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), header.sizes.begin());
}

FlightCall call_of(
    const Fields& fields, const std::vector<FlightGroup>& groups) {
  if (groups.empty()) {
    fields.refuse("there is a call but no group");
  }
  FlightCall call{};
  call.group = static_cast<uint32_t>(
      fields.number("group", 0, static_cast<int64_t>(groups.size()) - 1));
  const FlightGroup& group = groups[call.group];
  CallHeader& header = call.header;
  header.seq = static_cast<uint64_t>(
      fields.number("seq", 0, static_cast<int64_t>(group.calls)));
  header.kind = static_cast<CollectiveKind>(fields.one_of(
      "kind", kKinds, [](int i) { return name_of(CollectiveKind(i)); }));
  header.dtype = static_cast<int8_t>(
      fields.one_of("dtype", kDtypes, [](int i) -> std::string_view {
        return c10::toString(static_cast<c10::ScalarType>(i));
      }));
  header.has_op = fields.has("op");
  header.op = ReduceOp::kSum;
  if (header.has_op) {
    header.op = static_cast<ReduceOp>(
        fields.one_of("op", kOps, [](int i) { return name_of(ReduceOp(i)); }));
  }
  const auto last = static_cast<int64_t>(group.world_ranks.size()) - 1;
  header.root = fields.has("root") ? fields.number("root", 0, last)
      : fields.has("peer")         ? fields.number("peer", 0, last)
                                   : -1;
  copy_text(header.asker.data(), header.asker.size(), fields.text("asker"));
  read_shape(fields, call);
  call.tag = fields.has("tag")
      ? static_cast<int32_t>(fields.number("tag", INT32_MIN, INT32_MAX))
      : 0;
  call.state = static_cast<CallState>(fields.one_of(
      "state", kStates, [](int i) { return name_of(CallState(i)); }));
  call.start_ns = fields.number("start_ns", INT64_MIN, INT64_MAX);
  call.end_ns = fields.number("end_ns", INT64_MIN, INT64_MAX);
  return call;
}

} // namespace

FlightFile parse_flight(const std::string& path, std::string_view text) {
  const std::string where = fmt::format("comm dump [{}]", path);
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Fields fields(json, where);
  fields.number("tessera_flight_record", 1, 1);
  FlightFile file;
  file.path = path;
  FlightOwner& owner = file.owner;
  owner.job = fields.text("job");
  owner.size = fields.number("size", 1, kMaxWorld);
  owner.rank = fields.number("rank", 0, owner.size - 1);
  owner.host = fields.text("host");
  owner.pid = fields.number("pid", 0, INT64_MAX);
  file.reason = fields.text("reason");
  for (const Json& group : fields.list("groups", kMaxGroups)) {
    const auto name = fmt::format("{}, group {}", where, file.groups.size());
    file.groups.push_back(group_of(Fields(group, name), owner));
  }
  for (const Json& call : fields.list("calls", FlightRecord::kCalls)) {
    const auto name = fmt::format("{}, call {}", where, file.calls.size());
    file.calls.push_back(call_of(Fields(call, name), file.groups));
  }
  return file;
}

FlightFile read_flight_file(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::is_regular_file(path, error)
      ? std::filesystem::file_size(path, error)
      : 0;
  std::ifstream stream(path, std::ios::binary);
  if (error || !stream || !std::filesystem::is_regular_file(path, error)) {
    throw IoError(fmt::format(
        "comm dump [{}]: no file that can be read; give the files that the "
        "ranks' errors name",
        path));
  }
  if (bytes > kMaxFileBytes) {
    throw CorruptionError(fmt::format(
        "comm dump [{}]: {} bytes, expected at most {}",
        path,
        bytes,
        kMaxFileBytes));
  }
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_flight(path, text);
}

} // namespace tessera
