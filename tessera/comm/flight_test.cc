// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <tessera/base/error.h>
#include <tessera/comm/flight_merge.h>
#include <tessera/comm/record_impl.h>
#include <tessera/comm/run_ranks.h>
#include <torch/csrc/autograd/profiler_legacy.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera {
namespace {

using Counts = std::vector<int64_t>;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::ThrowsMessage;

// A folder for files of calls, named by TESSERA_DUMP_DIR while it lives.
class Folder {
 public:
  Folder()
      : path_(
            testing::TempDir() + "tessera_flight_" + std::to_string(getpid())) {
    std::filesystem::remove_all(path_);
    setenv("TESSERA_DUMP_DIR", path_.c_str(), 1);
  }
  ~Folder() {
    unsetenv("TESSERA_DUMP_DIR");
    std::filesystem::remove_all(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::vector<FlightFile> files() const {
    std::vector<FlightFile> files;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      files.push_back(read_flight_file(entry.path().string()));
    }
    return files;
  }

  const std::string& path() const {
    return path_;
  }

 private:
  std::string path_;
};

void reduce(const World& world, int64_t numel) {
  world.group().all_reduce(at::ones({numel}), ReduceOp::kSum)->wait();
}

TEST(FlightRecord, KeepsTheLastThousandCalls) {
  FlightRecord record;
  const uint32_t group =
      record.add_group({.id = "a", .name = "dp", .world_ranks = {0, 1}});
  const Counts shape{3, 4};
  for (int i = 0; i < 1500; ++i) {
    const uint64_t number = record.begin(
        group,
        {.kind = CollectiveKind::kAllReduce,
         .dtype = at::kFloat,
         .op = ReduceOp::kMax,
         .shape = shape},
        0,
        FlightRecord::Clock::now());
    record.end(number, CallState::kCompleted, FlightRecord::Clock::now());
  }
  record.end(3, CallState::kFailed, FlightRecord::Clock::now()); // forgotten
  const auto calls = record.calls();
  ASSERT_THAT(calls, SizeIs(1000));
  EXPECT_EQ(calls.front().header.seq, 501U);
  EXPECT_EQ(calls.back().header.seq, 1500U);
  for (const FlightCall& call : calls) {
    EXPECT_EQ(call.state, CallState::kCompleted);
    EXPECT_GE(call.end_ns, call.start_ns);
  }
}

TEST(FlightRecord, MessagesCarryTheNumberOfTheCollectiveBefore) {
  FlightRecord record;
  const uint32_t group =
      record.add_group({.id = "a", .name = "dp", .world_ranks = {0, 1}});
  const Counts shape{2};
  for (const auto kind :
       {CollectiveKind::kSend,
        CollectiveKind::kBarrier,
        CollectiveKind::kRecv}) {
    record.begin(group, {.kind = kind, .root = 1, .shape = shape}, 7, {});
  }
  const auto calls = record.calls();
  EXPECT_EQ(calls[0].header.seq, 0U);
  EXPECT_EQ(calls[1].header.seq, 1U);
  EXPECT_EQ(calls[2].header.seq, 1U);
  EXPECT_EQ(calls[2].tag, 7);
}

TEST(FlightFiles, AMismatchIsFoundWithItsRanksNumberAndAskers) {
  const Folder folder;
  run_ranks(3, [&](World world) {
    const AskerScope scope(world.rank() == 2 ? "mm" : "optimizer.step");
    reduce(world, 7);
    EXPECT_THAT(
        [&] { reduce(world, world.rank() == 2 ? 6 : 5); },
        ThrowsMessage<PeerError>(AllOf(
            HasSubstr("shapes must match"),
            HasSubstr("this rank's last calls are in " + folder.path()),
            HasSubstr(fmt::format(".rank{}.json", world.rank())))));
  });
  const FlightReport report = merge_flights(folder.files());
  EXPECT_EQ(report.size, 3);
  EXPECT_THAT(report.missing, IsEmpty());
  ASSERT_THAT(report.differences, SizeIs(1));
  const FlightDifference& difference = report.differences[0];
  EXPECT_EQ(difference.group, "world");
  EXPECT_EQ(difference.seq, 2U);
  EXPECT_EQ(difference.what, "shapes must match");
  ASSERT_THAT(difference.places, SizeIs(3));
  EXPECT_EQ(difference.places[0].call, "all_reduce(sum) of Float [5]");
  EXPECT_EQ(difference.places[2].call, "all_reduce(sum) of Float [6]");
  EXPECT_EQ(difference.places[0].asker, "optimizer.step");
  EXPECT_EQ(difference.places[2].asker, "mm");
  EXPECT_EQ(difference.places[2].state, CallState::kFailed);
}

TEST(FlightFiles, AreReadableByTheirOwnerOnlyAndReplaced) {
  const Folder folder;
  run_ranks(2, [](World world) {
    reduce(world, 3);
    const std::string first = world.record().write_calls();
    reduce(world, 4);
    const std::string second = world.record().write_calls("a look");
    EXPECT_EQ(first, second);
    struct stat status {};
    ASSERT_EQ(stat(second.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600U);
    const FlightFile file = read_flight_file(second);
    EXPECT_EQ(file.reason, "a look");
    EXPECT_EQ(file.owner.rank, world.rank());
    EXPECT_EQ(file.owner.pid, getpid());
    EXPECT_THAT(file.calls, SizeIs(2));
    EXPECT_EQ(file.groups.at(0).world_ranks, (Counts{0, 1}));
  });
  EXPECT_THAT(folder.files(), SizeIs(2)); // nothing unfinished lies beside them
  EXPECT_THAT(merge_flights(folder.files()).differences, IsEmpty());
}

TEST(FlightFiles, TheDefaultFolderIsTheUsersAlone) {
  unsetenv("TESSERA_DUMP_DIR");
  run_ranks(1, [](World world) {
    const std::string path = world.record().write_calls();
    const std::string folder = fmt::format("/tmp/tessera-{}", geteuid());
    EXPECT_THAT(path, HasSubstr(folder + "/flight."));
    struct stat status {};
    ASSERT_EQ(stat(folder.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700U);
    unlink(path.c_str());
  });
}

TEST(FlightFiles, OnlyTheNewestStayInTheDefaultFolder) {
  unsetenv("TESSERA_DUMP_DIR");
  const std::string folder = fmt::format("/tmp/tessera-{}", geteuid());
  const FlightOwner owner{.job = "0123456789abcdef", .host = "box"};
  unlink(write_flight_file(owner, "{}").c_str()); // makes the folder
  const auto old = std::filesystem::file_time_type::clock::now() -
      std::chrono::hours(24 * 365);
  for (int i = 0; i < 1100; ++i) {
    const std::string path = fmt::format("{}/flight.test.{}", folder, i);
    std::ofstream(path) << "old";
    std::filesystem::last_write_time(path, old);
  }
  const std::string kept = write_flight_file(owner, "{}");
  std::size_t old_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("flight.test.")) {
      ++old_files;
      std::filesystem::remove(entry.path());
    }
  }
  EXPECT_LE(old_files, 1024U);
  EXPECT_EQ(unlink(kept.c_str()), 0);
}

TEST(FlightFiles, AFolderThatCannotBeMadeDoesNotHideTheError) {
  setenv("TESSERA_DUMP_DIR", "/dev/null/nowhere", 1);
  run_ranks(2, [](World world) {
    EXPECT_THAT(
        [&] { reduce(world, 1 + world.rank()); },
        ThrowsMessage<PeerError>(AllOf(
            HasSubstr("shapes must match"),
            HasSubstr("could not be written"),
            HasSubstr("/dev/null/nowhere"))));
    EXPECT_THROW(world.record().write_calls(), IoError);
  });
  unsetenv("TESSERA_DUMP_DIR");
}

TEST(FlightFiles, WhoDidNotCallIsNamedWithItsLastCall) {
  const Folder folder;
  run_ranks(
      3,
      [](World world) {
        reduce(world, 7);
        if (world.rank() == 1) {
          world.store()->wait({"seen by 0", "seen by 2"});
          world.record().write_calls();
          return;
        }
        EXPECT_THROW(reduce(world, 5), TimeoutError);
        world.store()->set("seen by " + std::to_string(world.rank()), "1");
      },
      {.timeout = std::chrono::milliseconds(200)});
  const FlightReport report = merge_flights(folder.files());
  ASSERT_THAT(report.differences, SizeIs(1));
  EXPECT_EQ(report.differences[0].what, "rank 1 did not call it");
  EXPECT_EQ(report.differences[0].seq, 2U);
  const FlightPlace& absent = report.differences[0].places[1];
  EXPECT_THAT(absent.call, IsEmpty());
  EXPECT_THAT(
      absent.remark,
      AllOf(HasSubstr("seq 1"), HasSubstr("[7]"), HasSubstr("completed")));
}

TEST(FlightFiles, ARankWithoutAFileIsNamed) {
  const Folder folder;
  run_ranks(3, [](World world) {
    reduce(world, 7);
    if (world.rank() != 1) { // it leaves without a word
      EXPECT_THROW(reduce(world, 5), PeerError);
    }
  });
  const FlightReport report = merge_flights(folder.files());
  EXPECT_THAT(report.missing, ElementsAre(1));
  ASSERT_THAT(report.differences, SizeIs(1));
  EXPECT_THAT(
      report.differences[0].what,
      AllOf(HasSubstr("failed on"), HasSubstr("rank 1 left no file")));
  EXPECT_EQ(report.differences[0].places[1].remark, "no file");
}

TEST(FlightFiles, TheFirstOfSeveralGroupsComesFirst) {
  const Folder folder;
  run_ranks(2, [](World world) {
    const Group late = world.new_group(Counts{0, 1}, "a");
    const Group early = world.new_group(Counts{0, 1}, "b");
    for (const Group& group : {early, late}) {
      EXPECT_THROW(
          group.all_reduce(at::ones({1 + world.rank()}), ReduceOp::kSum),
          PeerError);
      world.store()->set("past " + std::to_string(world.rank()), "1");
      world.store()->wait({"past 0", "past 1"});
    }
    world.record().write_calls();
  });
  const FlightReport report = merge_flights(folder.files());
  ASSERT_THAT(report.differences, SizeIs(2));
  EXPECT_EQ(report.differences[0].group, "b");
  EXPECT_EQ(report.differences[1].group, "a");
}

TEST(FlightFiles, CountsBeyondTheKeptOnesAreComparedToo) {
  std::vector<FlightFile> files;
  for (int64_t rank = 0; rank < 2; ++rank) {
    FlightRecord record;
    record.owner = {.job = "j", .rank = rank, .size = 2, .host = "box"};
    const uint32_t group =
        record.add_group({.id = "w", .name = "w", .world_ranks = {0, 1}});
    Counts counts(12, 5);
    counts.back() += rank;
    record.begin(
        group,
        {.kind = CollectiveKind::kAllGather, .counts = counts},
        0,
        FlightRecord::Clock::now());
    files.push_back(parse_flight("file", flight_json(record, "test")));
  }
  const FlightReport report = merge_flights(files);
  ASSERT_THAT(report.differences, SizeIs(1));
  EXPECT_EQ(report.differences[0].what, "counts must match");
}

class FlightText : public testing::Test {
 protected:
  FlightText() {
    FlightRecord record;
    record.owner = {.job = "j", .rank = 1, .size = 2, .host = "box"};
    const uint32_t group =
        record.add_group({.id = "w", .name = "w", .world_ranks = {0, 1}});
    const Counts counts{3, 4};
    const Counts shape{5};
    record.begin(
        group,
        {.kind = CollectiveKind::kReduceScatter,
         .op = ReduceOp::kSum,
         .counts = counts},
        0,
        FlightRecord::Clock::now());
    record.begin(
        group,
        {.kind = CollectiveKind::kBroadcast, .root = 1, .shape = shape},
        0,
        FlightRecord::Clock::now());
    good = nlohmann::json::parse(flight_json(record, "test"));
  }

  void expect_refused(
      const std::string& pointer, const nlohmann::json& value) const {
    nlohmann::json bad = good;
    bad[nlohmann::json::json_pointer(pointer)] = value;
    EXPECT_THROW(parse_flight("f", bad.dump()), CorruptionError)
        << pointer << " = " << value;
  }

  nlohmann::json good;
};

TEST_F(FlightText, ReadsBackWhatWasWritten) {
  const FlightFile file = parse_flight("f", good.dump());
  ASSERT_THAT(file.calls, SizeIs(2));
  EXPECT_EQ(file.calls[0].counts, FlightCounts::of(Counts{3, 4}));
  EXPECT_EQ(file.calls[0].header.kind, CollectiveKind::kReduceScatter);
  EXPECT_TRUE(file.calls[0].header.has_op);
  EXPECT_EQ(file.calls[1].header.root, 1);
  EXPECT_EQ(file.calls[1].header.sizes[0], 5);
  EXPECT_EQ(file.calls[1].header.seq, 2U);
}

TEST_F(FlightText, ValuesOutOfPlaceAreRefused) {
  for (const nlohmann::json& value :
       {nlohmann::json(-1), nlohmann::json("x"), nlohmann::json(1e30)}) {
    for (const char* pointer :
         {"/tessera_flight_record",
          "/rank",
          "/size",
          "/pid",
          "/groups",
          "/calls",
          "/groups/0/calls",
          "/groups/0/ranks/0",
          "/calls/0/group",
          "/calls/0/seq",
          "/calls/0/counts/size",
          "/calls/0/counts/first/1",
          "/calls/1/shape/0",
          "/calls/1/root",
          "/calls/0/kind",
          "/calls/0/op",
          "/calls/0/dtype",
          "/calls/0/state"}) {
      expect_refused(pointer, value);
    }
  }
  expect_refused("/rank", 2);
  expect_refused("/size", uint64_t{1} << 63);
  expect_refused("/groups/0/ranks", {0, 0});
  expect_refused("/groups/0/ranks", {0});
  expect_refused("/calls/0/group", 1);
  expect_refused("/calls/1/seq", 3);
  expect_refused("/calls/1/root", 2);
  expect_refused("/calls/0/counts/first", {3});
  expect_refused("/calls/0/counts/hash", "not hex");
  expect_refused("/calls/1/shape", std::vector<int>(17, 1));
  expect_refused("/job", 5);
}

TEST_F(FlightText, EveryCutIsRefused) {
  const std::string text = good.dump();
  for (std::size_t length = 0; length < text.size(); length += 7) {
    EXPECT_THROW(
        parse_flight("f", std::string_view(text).substr(0, length)),
        CorruptionError);
  }
}

TEST_F(FlightText, ControlCharactersDoNotReachATerminal) {
  good["reason"] = "a\x1b[31mb";
  EXPECT_EQ(parse_flight("f", good.dump()).reason, "a [31mb");
}

TEST_F(FlightText, FilesThatDoNotBelongTogetherAreRefused) {
  const FlightFile one = parse_flight("one", good.dump());
  EXPECT_THAT(
      [&] {
        merge_flights({one, one});
      },
      ThrowsMessage<UsageError>(HasSubstr("both of rank 1")));
  good["job"] = "other";
  const FlightFile other = parse_flight("two", good.dump());
  EXPECT_THAT(
      [&] {
        merge_flights({one, other});
      },
      ThrowsMessage<UsageError>(HasSubstr("files of one job")));
  EXPECT_THROW(merge_flights({}), UsageError);
  EXPECT_THROW(read_flight_file("/no/such/file"), IoError);
  EXPECT_THROW(read_flight_file("/dev/zero"), IoError);
}

TEST(ChromeTrace, HoldsEveryCollectiveOnItsAxisTrack) {
  run_ranks(2, [](World world) {
    const AskerScope scope("mm");
    reduce(world, 100);
    world.new_group(Counts{0, 1}, "dp").barrier()->wait();
    const auto trace = nlohmann::json::parse(world.record().chrome_trace());
    std::vector<std::string> names;
    for (const auto& event : trace.at("traceEvents")) {
      if (event.at("ph") != "X") {
        continue;
      }
      names.push_back(event.at("name"));
      EXPECT_EQ(event.at("pid"), world.rank());
      EXPECT_EQ(event.at("tid"), event.at("name") == "barrier" ? 1 : 0);
      EXPECT_GT(event.at("dur").get<double>(), 0);
      EXPECT_EQ(event.at("args").at("asker"), "mm");
    }
    EXPECT_THAT(names, ElementsAre("all_reduce", "barrier"));
  });
}

// Names of the ranges that torch's profiler saw on this thread.
std::vector<std::string> profiled(const std::function<void()>& fn) {
  namespace profiler = torch::autograd::profiler;
  profiler::enableProfilerLegacy(torch::profiler::impl::ProfilerConfig(
      torch::profiler::impl::ProfilerState::CPU));
  fn();
  std::vector<std::string> names;
  for (const auto& thread : profiler::disableProfilerLegacy()) {
    for (const auto& event : thread) {
      if (event.kindStr() == "push") {
        names.emplace_back(event.name());
      }
    }
  }
  return names;
}

TEST(Profiler, SeesCollectivesAsNamedRanges) {
  for (const char* backend : {"shm", "gloo"}) {
    run_ranks(
        2,
        [](World world) {
          const at::Tensor x = at::ones({10});
          const auto names = profiled([&] {
            world.group().all_reduce(x, ReduceOp::kSum)->wait();
            world.group().broadcast(x, 0)->wait();
          });
          EXPECT_THAT(
              names,
              testing::IsSupersetOf(
                  {"tessera::all_reduce world", "tessera::broadcast world"}));
        },
        {.backend = backend});
  }
}

} // namespace
} // namespace tessera
