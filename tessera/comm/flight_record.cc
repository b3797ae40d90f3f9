// SPDX-License-Identifier: Apache-2.0
#include <c10/core/ScalarType.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/flight_record.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFolderVariable = "TESSERA_DUMP_DIR";
constexpr std::size_t kMostFiles = 1024; // in the user's own folder

int64_t nanoseconds(FlightRecord::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             time.time_since_epoch())
      .count();
}

// What must be added to a time of the steady clock to make it one of the wall
// clock.
int64_t wall_offset_ns() {
  const auto wall = std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  return wall - nanoseconds(FlightRecord::Clock::now());
}

void add_counts(Json& json, const char* name, const FlightCounts& counts) {
  json[name] = {
      {"size", counts.size},
      {"first", counts.kept()},
      {"hash", fmt::format("{:016x}", counts.hash)}};
}

Json json_of(const FlightCall& call, int64_t offset_ns) {
  const CallHeader& header = call.header;
  const bool message = header.kind == CollectiveKind::kSend ||
      header.kind == CollectiveKind::kRecv;
  Json json = {
      {"group", call.group},
      {"seq", header.seq},
      {"kind", name_of(header.kind)},
      {"dtype", c10::toString(static_cast<c10::ScalarType>(header.dtype))},
      {"state", name_of(call.state)},
      {"asker", header.asker.data()},
      {"start_ns", call.start_ns + offset_ns},
      {"end_ns", call.end_ns == 0 ? 0 : call.end_ns + offset_ns}};
  if (header.has_op) {
    json["op"] = name_of(header.op);
  }
  if (header.ndim >= 0) {
    json["shape"] = std::vector<int64_t>(
        header.sizes.begin(),
        header.sizes.begin() +
            std::min<int64_t>(header.ndim, int64_t{kMaxHeaderDims}));
  } else {
    add_counts(json, "counts", call.counts);
    add_counts(json, "out_counts", call.out_counts);
  }
  if (header.root >= 0) {
    json[message ? "peer" : "root"] = header.root;
  }
  if (message) {
    json["tag"] = call.tag;
  }
  return json;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw IoError(fmt::format(
      "flight record [{}]: {}; set {}", path, why, kFolderVariable));
}

// The user's own folder below /tmp. Others can write there too, so what is
// found must be a folder, this user's, and closed to everybody else.
std::string private_folder() {
  std::string path = fmt::format("/tmp/tessera-{}", geteuid());
  if (mkdir(path.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    refuse(path, std::strerror(errno));
  }
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) {
    refuse(path, std::strerror(errno));
  }
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() ||
      (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse(path, "is not a folder that this user alone can enter");
  }
  return path;
}

// Of the files in the user's own folder only the newest stay: nobody else
// tidies it up.
void forget_old_files(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error; // others may remove files at the same time
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with("flight.")) {
      files.emplace_back(entry.last_write_time(error), entry.path());
    }
  }
  if (files.size() <= kMostFiles) {
    return;
  }
  const auto old = static_cast<std::ptrdiff_t>(files.size() - kMostFiles);
  std::nth_element(files.begin(), files.begin() + old, files.end());
  for (auto file = files.begin(); file != files.begin() + old; ++file) {
    fs::remove(file->second, error);
  }
}

std::string folder() {
  const auto named = environment(kFolderVariable);
  if (!named) {
    std::string own = private_folder();
    forget_old_files(own);
    return own;
  }
  std::error_code error;
  std::filesystem::create_directories(*named, error);
  if (error) {
    refuse(*named, error.message());
  }
  return *named;
}

// Writes all of `text` into a file that did not exist before.
void write_new(const std::string& path, std::string_view text) {
  const int fd = open(
      path.c_str(),
      O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
      S_IRUSR | S_IWUSR);
  if (fd < 0) {
    refuse(path, std::strerror(errno));
  }
  bool good = true;
  while (good && !text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    good = written > 0 || (written < 0 && errno == EINTR);
    text.remove_prefix(written > 0 ? static_cast<std::size_t>(written) : 0);
  }
  const int error = errno;
  close(fd);
  if (!good) {
    unlink(path.c_str());
    refuse(path, std::strerror(error));
  }
}

} // namespace

std::string_view name_of(CallState state) {
  static constexpr std::array<std::string_view, 3> kNames = {
      "issued", "completed", "failed"};
  return kNames.at(static_cast<std::size_t>(state));
}

FlightCounts FlightCounts::of(std::span<const int64_t> counts) {
  FlightCounts kept;
  kept.size = static_cast<uint32_t>(counts.size());
  std::copy_n(
      counts.begin(), std::min(counts.size(), kKept), kept.first.begin());
  kept.hash = 14695981039346656037U; // FNV-1a, over whole counts
  for (const int64_t count : counts) {
    kept.hash = (kept.hash ^ static_cast<uint64_t>(count)) * 1099511628211U;
  }
  return kept;
}

uint32_t FlightRecord::add_group(FlightGroup group) {
  groups_.push_back(std::move(group));
  return static_cast<uint32_t>(groups_.size() - 1);
}

uint64_t FlightRecord::begin(
    uint32_t group,
    const CallDescription& call,
    int32_t tag,
    Clock::time_point start) {
  if (ring_.empty()) {
    ring_.resize(kCalls);
  }
  const bool message =
      call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kRecv;
  uint64_t& calls = groups_.at(group).calls;
  calls += message ? 0 : 1;
  FlightCall& slot = ring_[next_ % kCalls];
  slot.header = header_of(call, calls);
  if (!call.shape) {
    slot.counts = FlightCounts::of(call.counts);
    slot.out_counts = FlightCounts::of(call.out_counts);
  }
  slot.group = group;
  slot.tag = tag;
  slot.state = CallState::kIssued;
  slot.start_ns = nanoseconds(start);
  slot.end_ns = 0;
  return next_++;
}

void FlightRecord::end(
    uint64_t number, CallState state, Clock::time_point end) {
  if (number + kCalls < next_) {
    return;
  }
  FlightCall& call = ring_[number % kCalls];
  call.state = state;
  call.end_ns = nanoseconds(end);
}

std::vector<FlightCall> FlightRecord::calls() const {
  std::vector<FlightCall> calls;
  for (uint64_t i = next_ > kCalls ? next_ - kCalls : 0; i < next_; ++i) {
    calls.push_back(ring_[i % kCalls]);
  }
  return calls;
}

std::string flight_json(const FlightRecord& record, std::string_view reason) {
  const FlightOwner& owner = record.owner;
  Json groups = Json::array();
  for (const FlightGroup& group : record.groups()) {
    groups.push_back(
        {{"id", group.id},
         {"name", group.name},
         {"ranks", group.world_ranks},
         {"calls", group.calls}});
  }
  Json calls = Json::array();
  const int64_t offset = wall_offset_ns();
  for (const FlightCall& call : record.calls()) {
    calls.push_back(json_of(call, offset));
  }
  const Json all = {
      {"tessera_flight_record", 1},
      {"job", owner.job},
      {"rank", owner.rank},
      {"size", owner.size},
      {"host", owner.host},
      {"pid", owner.pid},
      {"reason", reason},
      {"groups", std::move(groups)},
      {"calls", std::move(calls)}};
  return all.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string write_flight_file(const FlightOwner& owner, std::string_view text) {
  std::string path =
      fmt::format("{}/flight.{}.rank{}.json", folder(), owner.job, owner.rank);
  std::random_device random;
  const std::string fresh = fmt::format("{}.{:08x}", path, random());
  write_new(fresh, text);
  if (rename(fresh.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(fresh.c_str());
    refuse(path, std::strerror(error));
  }
  return path;
}

} // namespace tessera
