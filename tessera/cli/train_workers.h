// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/cli/line_process.h>
#include <tessera/cli/train_blocks.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::cli {

enum class WorkersAre : uint8_t {
  kOneJob, // ranks of one job, with the variables that torchrun sets
  kIndependent // each alone, without such variables
};

// Processes of one command that train when told (train_blocks.h), with one
// thread each. Between blocks they sleep, so that others can be measured.
class TrainWorkers {
 public:
  // Starts them. `name` stands in errors. Throws IoError.
  TrainWorkers(
      const std::string& name,
      const std::vector<std::string>& command,
      int64_t count,
      WorkersAre are);
  // Ends them: those that do not end soon are killed.
  ~TrainWorkers();
  TrainWorkers(const TrainWorkers&) = delete;
  TrainWorkers& operator=(const TrainWorkers&) = delete;

  // Blocks until all are ready. Returns the number of the model's parameters.
  // Throws IoError for one that ends, or that has another number.
  int64_t await_ready();

  // A block of `steps` steps on all of them at the same time. Throws IoError.
  std::vector<BlockReport> run(int64_t steps);

 private:
  std::shared_ptr<void> store_; // where the ranks of a job meet
  std::vector<std::unique_ptr<LineProcess>> processes_;
};

} // namespace tessera::cli
