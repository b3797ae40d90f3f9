// SPDX-License-Identifier: Apache-2.0
// The life of a call.
//
// A call starts one or more requests of MPI and returns. MPI moves data while
// some thread of this process is inside MPI, which here means: while somebody
// waits for any call, tests one, or starts another. Nobody else drives it,
// except for Works whose future somebody has asked for (mpi_progress.h).
//
// MPI cannot take back a collective that has started. A call whose wait has
// timed out, or whose group has died, may still be written to by a peer that
// comes late; so its buffers stay alive for the rest of the process.
#include <fmt/format.h>
#include <sched.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_group.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/mpi/mpi_work.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatienceAtEnd = std::chrono::seconds(5);

// Some MPI libraries mishandle large messages: the variable makes them smaller.
int64_t largest_count() {
  const auto given = environment_int("TESSERA_MPI_MAX_COUNT");
  return std::clamp<int64_t>(given.value_or(INT_MAX), 1, INT_MAX);
}

// The largest tag is kept for all_to_all.
int largest_tag(MPI_Comm communicator) {
  constexpr int kGuaranteed = 32'767;
  void* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(communicator, MPI_TAG_UB, &value, &found);
  return (found != 0 ? *static_cast<int*>(value) : kGuaranteed) - 1;
}

// The first error among the requests of a test that failed.
int first_error(int code, const std::vector<MPI_Status>& statuses) {
  if (code != MPI_ERR_IN_STATUS) {
    return code;
  }
  for (const MPI_Status& status : statuses) {
    if (status.MPI_ERROR != MPI_SUCCESS &&
        status.MPI_ERROR != MPI_ERR_PENDING) {
      return status.MPI_ERROR;
    }
  }
  return code;
}

int64_t bytes_received(
    const std::vector<MPI_Status>& statuses, std::size_t receives) {
  int64_t sum = 0;
  for (std::size_t index = 0; index < receives; ++index) {
    const MPI_Status& status = statuses[index];
    MPI_Count bytes = 0;
    MPI_Get_elements_x(&status, MPI_BYTE, &bytes);
    sum += bytes;
  }
  return sum;
}

// Keeps what MPI may still write to.
void bury(std::deque<MpiOperationPtr> operations) {
  static auto* graves = new std::deque<MpiOperationPtr>;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  for (MpiOperationPtr& operation : operations) {
    graves->push_back(std::move(operation));
  }
}

} // namespace

MpiGroup::MpiGroup(
    MPI_Comm communicator,
    const GroupSetup& setup,
    std::shared_ptr<MpiSession> session)
    : communicator_(communicator),
      session_(std::move(session)),
      rank_(static_cast<int>(setup.rank)),
      size_(static_cast<int>(setup.size())),
      name_(setup.name),
      timeout_(setup.timeout),
      max_count_(largest_count()),
      max_tag_(largest_tag(communicator)),
      peers_(setup.peers),
      failure_(setup, "mpi") {
  if (peers_) {
    listener_ = peers_->add_listener([this](int64_t world_rank) {
      if (failure_.in_group(world_rank)) {
        die(failure_.end_of(world_rank));
      }
    });
  }
}

MpiGroup::~MpiGroup() {
  if (peers_) {
    peers_->remove_listener(listener_);
  }
  const bool in_order = mpi_is_running() && std::uncaught_exceptions() == 0;
  try {
    if (in_order) {
      finish_pending();
    }
  } catch (const std::exception&) {
    dead_ = true; // this thread may not call MPI
  }
  if (in_order && !dead_ && pending_.empty()) {
    free_communicator(communicator_);
  }
  bury(std::move(pending_));
}

void MpiGroup::finish_pending() {
  const auto deadline = Clock::now() + kPatienceAtEnd;
  while (!dead_ && !pending_.empty() && Clock::now() < deadline) {
    if (test(*pending_.front())) {
      pending_.pop_front();
    } else {
      sched_yield();
    }
  }
}

std::string MpiGroup::where(std::string_view operation, uint64_t seq) const {
  return fmt::format(
      "{} [rank {}/{}, group {}, seq {}]", operation, rank_, size_, name_, seq);
}

MpiOperationPtr MpiGroup::begin(CollectiveKind kind, c10d::OpType type) {
  const bool message =
      kind == CollectiveKind::kSend || kind == CollectiveKind::kRecv;
  auto one = std::make_shared<MpiOperation>();
  one->seq = message ? seq_.load() : ++seq_;
  one->where = where(name_of(kind), one->seq);
  one->type = type;
  failure_.note(kind, one->seq);
  if (dead_) {
    const std::scoped_lock lock(mutex_);
    throw PeerError(
        one->where + ": the group is dead; first error: " + reason_);
  }
  return one;
}

WorkPtr MpiGroup::start(
    const MpiOperationPtr& operation, const std::function<void()>& post) {
  sweep();
  try {
    const MpiTurn turn;
    post();
  } catch (const PeerError& error) {
    bury({operation});
    const auto explained = explain(*operation, error);
    die(message_of(explained));
    std::rethrow_exception(explained);
  }
  {
    const std::scoped_lock lock(mutex_);
    pending_.push_back(operation);
  }
  return c10::make_intrusive<MpiWork>(shared_from_this(), operation);
}

// Lets go of what is done, and moves on what nobody else holds any more.
void MpiGroup::sweep() {
  while (true) {
    MpiOperationPtr oldest;
    {
      const std::scoped_lock lock(mutex_);
      if (pending_.empty()) {
        return;
      }
      oldest = pending_.front();
    }
    constexpr int64_t kOurs = 2; // here and in pending_
    const bool nobody_waits = oldest.use_count() == kOurs;
    {
      const std::scoped_lock lock(oldest->mutex);
      if (!oldest->done && !nobody_waits) {
        return;
      }
    }
    if (dead_ || !test(*oldest)) {
      return;
    }
    const std::scoped_lock lock(mutex_);
    if (!pending_.empty() && pending_.front() == oldest) {
      pending_.pop_front();
    }
  }
}

bool MpiGroup::test(MpiOperation& operation) {
  const std::scoped_lock own(operation.mutex);
  if (operation.done) {
    return true;
  }
  auto& requests = operation.requests;
  std::vector<MPI_Status> statuses(requests.size());
  int done = 0;
  int64_t received = 0;
  int code = MPI_SUCCESS;
  {
    const MpiTurn turn;
    code = MPI_Testall(
        static_cast<int>(requests.size()),
        requests.data(),
        &done,
        statuses.data());
    if (code == MPI_SUCCESS && done != 0) {
      received = bytes_received(statuses, operation.receives);
    }
  }
  if (code != MPI_SUCCESS) {
    fail(
        operation,
        explain(
            operation,
            std::runtime_error(mpi_error_text(first_error(code, statuses)))));
  } else if (done != 0) {
    complete(operation, received);
  } else if (dead_) {
    const std::scoped_lock lock(mutex_);
    operation.error = std::make_exception_ptr(PeerError(
        operation.where + ": the group is dead; first error: " + reason_));
    operation.done = true;
  }
  return operation.done;
}

void MpiGroup::complete(MpiOperation& operation, int64_t received_bytes) {
  if (received_bytes != operation.expected_bytes) {
    return fail(
        operation,
        std::make_exception_ptr(PeerError(fmt::format(
            "{}: got messages of {} bytes, expected {}; shapes must match",
            operation.where,
            received_bytes,
            operation.expected_bytes))));
  }
  try {
    if (operation.last) {
      operation.last();
    }
  } catch (...) {
    operation.error = std::current_exception();
  }
  operation.done = true;
  operation.last = nullptr;
  operation.held.clear();
}

void MpiGroup::fail(MpiOperation& operation, std::exception_ptr error) {
  die(message_of(error));
  operation.error = std::move(error);
  operation.done = true;
}

std::exception_ptr MpiGroup::explain(
    const MpiOperation& operation, const std::exception& error) const {
  std::string said = error.what();
  if (said.starts_with(operation.where + ": ")) { // it comes first anyway
    said.erase(0, operation.where.size() + 2);
  }
  return failure_.explain(
      {.where = operation.where,
       .seq = operation.seq,
       .suspect = operation.peer,
       .message = operation.peer >= 0},
      std::runtime_error(said));
}

bool MpiGroup::wait(MpiOperation& operation, std::chrono::milliseconds limit) {
  constexpr int kSpins = 200; // a few microseconds before others get the core
  constexpr int kLooks = 64; // at the clock, one in so many turns
  const auto deadline = Clock::now() + limit;
  for (int turn = 1; !test(operation); ++turn) {
    if (turn > kSpins) {
      sched_yield();
    }
    if (turn % kLooks == 0 && Clock::now() > deadline) {
      return false;
    }
  }
  return true;
}

// A caller that only looks in for a while blames nobody.
void MpiGroup::time_out(
    const MpiOperation& operation, std::chrono::milliseconds limit) {
  if (limit < timeout_) {
    throw TimeoutError(fmt::format(
        "{}: not done within {} ms", operation.where, limit.count()));
  }
  const auto error = explain(operation, std::runtime_error("timed out"));
  die(message_of(error));
  std::rethrow_exception(error);
}

void MpiGroup::die(const std::string& reason) {
  const std::scoped_lock lock(mutex_);
  reason_ = reason_.empty() ? reason : reason_;
  dead_ = true;
}

void MpiGroup::abort_job(const std::string& reason) {
  die(reason);
  if (peers_) {
    peers_->fail(reason);
  }
  std::fprintf(
      stderr,
      "tessera: group %s is aborted, and the job with it: %s\n",
      name_.c_str(),
      reason.c_str());
  std::fflush(nullptr);
  const MpiTurn turn;
  MPI_Abort(communicator_, 1);
  std::abort();
}

} // namespace tessera
