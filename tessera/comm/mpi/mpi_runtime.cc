// SPDX-License-Identifier: Apache-2.0
// MPI in this process.
//
// Threads. All calls of MPI are made under one lock, and none of them blocks
// for long: collectives are started and then tested. So MPI_THREAD_SERIALIZED
// is enough for us. We ask for MPI_THREAD_MULTIPLE, so that the program may
// call MPI beside us. A program that has called MPI_Init itself may have less;
// then only the thread that initialised MPI can call collectives, and another
// one gets an error.
//
// The end. Who initialised MPI finalises it: the program, or we when the
// process exits. MPI's rule that one failed rank ends the job is kept, because
// the others may wait for it: an exit with a code other than 0 is MPI_Abort.
// An exit with code 0 while a world is open, or after an exception has left
// one, is an end in order only if the other ranks end too, within a few
// seconds. A rank that dies without exiting is its launcher's to notice, and
// all launchers end the job then.
#include <fmt/format.h>
#include <sched.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_progress.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/mpi/mpi_types.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kEndTogether = std::chrono::seconds(3);

struct Runtime {
  std::timed_mutex mutex;
  bool started = false;
  bool has_one_thread = false;
  std::thread::id main_thread;
  int open_sessions = 0;
  bool unwound = false; // an exception closed a session
};

Runtime& runtime() {
  static auto* one = new Runtime; // is used until the very end
  return *one;
}

bool asks(int (*question)(int*)) {
  int answer = 0;
  question(&answer);
  return answer != 0;
}

// Whether all ranks have come to their end, too. Without a limit waits on.
bool all_ranks_end(std::optional<Clock::duration> limit) {
  const auto deadline = Clock::now() + limit.value_or(Clock::duration{});
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) {
    return false;
  }
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
         done == 0) {
    if (limit && Clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return done != 0;
}

void end_mpi(int status, void* /*unused*/) {
  stop_mpi_progress();
  Runtime& own = runtime();
  if (!mpi_is_running()) {
    return;
  }
  std::fflush(nullptr); // MPI_Abort does not come back
  const std::unique_lock lock(own.mutex, std::chrono::seconds(1));
  if (status != 0 || !lock) {
    MPI_Abort(MPI_COMM_WORLD, status == 0 ? 1 : status);
  }
  const bool in_order = own.open_sessions == 0 && !own.unwound;
  if (!all_ranks_end(
          in_order ? std::nullopt
                   : std::optional<Clock::duration>(kEndTogether))) {
    std::fputs(
        "tessera: this rank exits and other ranks do not; the job is "
        "aborted\n",
        stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}

void initialise() {
  int level = MPI_THREAD_SINGLE;
  const int code =
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  check_mpi(code, "init: MPI_Init_thread");
  on_exit(end_mpi, nullptr);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

// MPI_Finalize, whoever calls it, takes the attributes of MPI_COMM_SELF first.
int before_finalize(
    MPI_Comm /*self*/, int /*key*/, void* /*value*/, void* /*unused*/) {
  free_mpi_types();
  return MPI_SUCCESS;
}

void watch_for_finalize() {
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &key, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  MPI_Comm_free_keyval(&key); // lives on with the attribute
}

void note_threads(Runtime& own) {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  own.has_one_thread = level < MPI_THREAD_SERIALIZED;
  own.main_thread = std::this_thread::get_id();
  if (own.has_one_thread && !asks(MPI_Is_thread_main)) {
    throw UsageError(
        "init: MPI was initialised by another thread, without support for "
        "several; call MPI_Init_thread with MPI_THREAD_MULTIPLE");
  }
}

} // namespace

MpiTurn::MpiTurn() : lock_(runtime().mutex) {
  const Runtime& own = runtime();
  if (own.has_one_thread && std::this_thread::get_id() != own.main_thread) {
    throw UsageError(
        "mpi: a collective was called on a thread other than the one that "
        "initialised MPI, which was initialised without support for it; call "
        "MPI_Init_thread with MPI_THREAD_MULTIPLE");
  }
}

void start_mpi() {
  Runtime& own = runtime();
  const std::scoped_lock lock(own.mutex);
  if (own.started) {
    return;
  }
  if (asks(MPI_Finalized)) {
    throw UsageError(
        "init: MPI is finalised already in this process; call init() before "
        "MPI_Finalize");
  }
  if (!asks(MPI_Initialized)) {
    initialise();
  }
  note_threads(own);
  watch_for_finalize();
  own.started = true;
}

bool mpi_is_running() {
  return asks(MPI_Initialized) && !asks(MPI_Finalized);
}

bool mpi_has_one_thread() {
  return runtime().has_one_thread;
}

void free_communicator(MPI_Comm& communicator) noexcept {
  try {
    const MpiTurn turn;
    MPI_Comm_free(&communicator);
  } catch (const std::exception&) {
    return; // MPI frees it when it ends
  }
}

void count_mpi_session(int change) {
  Runtime& own = runtime();
  const std::scoped_lock lock(own.mutex);
  own.open_sessions += change;
  own.unwound = own.unwound || (change < 0 && std::uncaught_exceptions() > 0);
}

std::string mpi_error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return fmt::format("MPI error {}", code);
  }
  return {text.data(), static_cast<std::size_t>(length)};
}

void check_mpi(int code, const std::string& where) {
  if (code != MPI_SUCCESS) {
    throw PeerError(fmt::format(
        "{}: MPI says: {}; look at the other ranks' output",
        where,
        mpi_error_text(code)));
  }
}

} // namespace tessera
