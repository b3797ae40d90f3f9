// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/train_workers.h>
#include <tessera/comm/launch_spawn.h>
#include <tessera/comm/store.h>

#include <utility>

namespace tessera::cli {
namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

constexpr auto kMeeting = std::chrono::minutes(5);
constexpr auto kGrace = std::chrono::seconds(5); // to end by themselves

// The store is served here, as torchrun's agent serves it, so that no other
// process can take its port in between.
Variables job_variables(int64_t rank, int64_t count, const StoreAddress& at) {
  return {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(count)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(count)},
      {"MASTER_ADDR", at.host},
      {"MASTER_PORT", std::to_string(at.port)},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

} // namespace

TrainWorkers::TrainWorkers(
    const std::string& name,
    const std::vector<std::string>& command,
    int64_t count,
    WorkersAre are) {
  const bool job = are == WorkersAre::kOneJob;
  StoreAddress address{.host = "127.0.0.1"};
  if (job) {
    store_ = std::make_shared<c10::intrusive_ptr<c10d::Store>>(
        serve_store(address, kMeeting));
  }
  for (int64_t i = 0; i < count; ++i) {
    Variables ours = job ? job_variables(i, count, address) : Variables{};
    ours.emplace_back("OMP_NUM_THREADS", "1");
    processes_.push_back(std::make_unique<LineProcess>(
        fmt::format("{} [{} {}/{}]", name, job ? "rank" : "copy", i, count),
        command,
        environment_with(ours)));
  }
}

TrainWorkers::~TrainWorkers() {
  for (const auto& process : processes_) {
    process->close_input();
  }
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  for (const auto& process : processes_) {
    process->await_end(std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now()));
  }
}

int64_t TrainWorkers::await_ready() {
  int64_t parameters = -1;
  for (const auto& process : processes_) {
    const int64_t here =
        parse_ready_line(process->read_line(), process->name());
    if (parameters >= 0 && here != parameters) {
      throw IoError(fmt::format(
          "{}: a model of {} parameters, expected {} as in the other processes",
          process->name(),
          here,
          parameters));
    }
    parameters = here;
  }
  return parameters;
}

std::vector<BlockReport> TrainWorkers::run(int64_t steps) {
  for (const auto& process : processes_) {
    process->write_line(std::to_string(steps));
  }
  std::vector<BlockReport> reports;
  for (const auto& process : processes_) {
    reports.push_back(parse_block_line(process->read_line(), process->name()));
  }
  return reports;
}

} // namespace tessera::cli
