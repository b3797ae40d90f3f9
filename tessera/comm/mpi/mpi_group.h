// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <tessera/comm/mpi/mpi_plugin.h>
#include <tessera/comm/peer_failure.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace tessera {

// One call on its way: MPI's requests, and what MPI reads and writes until they
// are done.
struct MpiOperation {
  std::string where; // begins the messages of errors
  uint64_t seq = 0; // of the group's collectives; messages do not count
  int64_t peer = -1; // the other end of a message
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> held; // buffers of ours
  std::vector<int> counts; // MPI reads these, too
  std::vector<int> starts;
  std::function<void()> last; // runs once, when the requests are done
  // The first of the requests that are messages to this rank, and their bytes;
  // MPI would take shorter ones.
  std::size_t receives = 0;
  int64_t expected_bytes = 0;

  MPI_Request* next_request() {
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }

  std::mutex mutex; // of what follows
  std::vector<MPI_Request> requests;
  bool done = false;
  std::exception_ptr error;
};
using MpiOperationPtr = std::shared_ptr<MpiOperation>;

// A communicator and the calls on their way in it. It lives as long as its
// Works do. MPI does not say whose end broke a call, and some calls it lets
// wait for ever: the world's watch tells who is gone.
class MpiGroup : public std::enable_shared_from_this<MpiGroup> {
 public:
  // Takes over the communicator.
  MpiGroup(
      MPI_Comm communicator,
      const GroupSetup& setup,
      std::shared_ptr<MpiSession> session);
  ~MpiGroup();
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  MPI_Comm communicator() const {
    return communicator_;
  }
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  int64_t max_count() const {
    return max_count_;
  }
  int max_tag() const {
    return max_tag_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }

  // Begins a call: gives it its number and its name. Throws PeerError when the
  // group is dead.
  MpiOperationPtr begin(CollectiveKind kind, c10d::OpType type);
  // Runs `post`, which calls MPI, and hands out the Work.
  WorkPtr start(
      const MpiOperationPtr& operation, const std::function<void()>& post);

  // Whether the operation is done, well or not. Moves it on.
  bool test(MpiOperation& operation);
  // Blocks until it is done or the limit has passed. Returns whether it is.
  bool wait(MpiOperation& operation, std::chrono::milliseconds limit);
  // What a wait past its limit throws. With the group's own timeout it kills
  // the group and looks for who is behind it, which may take two seconds more.
  [[noreturn]] void time_out(
      const MpiOperation& operation, std::chrono::milliseconds limit);

  std::string where(std::string_view operation, uint64_t seq) const;
  void die(const std::string& reason);
  [[noreturn]] void abort_job(const std::string& reason);

 private:
  void sweep();
  void finish_pending();
  void complete(MpiOperation& operation, int64_t received_bytes);
  void fail(MpiOperation& operation, std::exception_ptr error);
  std::exception_ptr explain(
      const MpiOperation& operation, const std::exception& error) const;

  MPI_Comm communicator_;
  std::shared_ptr<MpiSession> session_;
  int rank_;
  int size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  int64_t max_count_;
  int max_tag_;
  std::shared_ptr<PeerWatch> peers_;
  PeerFailure failure_; // asked with no lock of MPI's or of this group's held
  uint64_t listener_ = 0;
  std::atomic<uint64_t> seq_ = 0;
  std::atomic<bool> dead_ = false;
  std::mutex mutex_; // of what follows
  std::string reason_; // why it is dead: the first error
  std::deque<MpiOperationPtr> pending_;
};

} // namespace tessera
