// SPDX-License-Identifier: Apache-2.0
// What the plug-in offers the library: sessions, made by its one entry.
#include <fmt/format.h>
#include <sched.h>
#include <tessera/base/error.h>
#include <tessera/comm/mpi/mpi_collectives.h>
#include <tessera/comm/mpi/mpi_runtime.h>
#include <tessera/comm/rendezvous.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kRecord = 1024; // bytes of one rank's text and a zero

class Session : public MpiSession,
                public std::enable_shared_from_this<Session> {
 public:
  explicit Session(const MpiSessionOptions& options)
      : timeout_(options.timeout) {
    const MpiTurn turn;
    const MPI_Comm given = options.communicator
        ? MPI_Comm_f2c(*options.communicator)
        : MPI_COMM_WORLD;
    if (given == MPI_COMM_NULL) {
      throw UsageError(
          "init: mpi_communicator is MPI_COMM_NULL; only its ranks call init");
    }
    check_mpi(MPI_Comm_dup(given, &communicator_), "init: MPI_Comm_dup");
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(communicator_, &rank_);
    MPI_Comm_size(communicator_, &size_);
    MPI_Comm_size(MPI_COMM_WORLD, &job_size_);
  }

  ~Session() override {
    count_mpi_session(-1);
    if (mpi_is_running() && std::uncaught_exceptions() == 0) {
      free_communicator(communicator_);
    }
  }

  int64_t rank() const override {
    return rank_;
  }
  int64_t size() const override {
    return size_;
  }
  int64_t job_size() const override {
    return job_size_;
  }
  std::vector<std::string> exchange(const std::string& own) override;
  std::unique_ptr<Collectives> make_group(const GroupSetup& setup) override;

 private:
  void wait(MPI_Request& request, const std::string& where) const;

  std::chrono::milliseconds timeout_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  int job_size_ = 0;
};

void Session::wait(MPI_Request& request, const std::string& where) const {
  const auto deadline = Clock::now() + timeout_;
  while (true) {
    int done = 0;
    {
      const MpiTurn turn;
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), where);
    }
    if (done != 0) {
      return;
    }
    if (Clock::now() > deadline) {
      throw TimeoutError(fmt::format(
          "{}: some ranks of the job did not come within {} ms; look at their "
          "output",
          where,
          timeout_.count()));
    }
    sched_yield();
  }
}

std::vector<std::string> Session::exchange(const std::string& own) {
  const std::string where =
      fmt::format("init [rank {}/{}]: MPI_Iallgather", rank_, size_);
  struct Texts {
    std::array<char, kRecord> given{};
    std::vector<char> all;
  };
  auto texts = std::make_unique<Texts>();
  own.copy(texts->given.data(), kRecord - 1);
  texts->all.resize(static_cast<std::size_t>(size_) * kRecord);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const MpiTurn turn;
    const int code = MPI_Iallgather(
        texts->given.data(),
        kRecord,
        MPI_CHAR,
        texts->all.data(),
        kRecord,
        MPI_CHAR,
        communicator_,
        &request);
    check_mpi(code, where);
  }
  try {
    wait(request, where);
  } catch (...) { // MPI may still read and write there, and cannot be stopped
    static auto* abandoned = new std::vector<std::unique_ptr<Texts>>;
    abandoned->push_back(std::move(texts));
    throw;
  }
  std::vector<std::string> received;
  for (std::size_t begin = 0; begin < texts->all.size(); begin += kRecord) {
    const char* text = &texts->all[begin];
    received.emplace_back(text, strnlen(text, kRecord - 1));
  }
  return received;
}

// Making a communicator blocks without a limit, so the ranks meet at the store
// before.
std::unique_ptr<Collectives> Session::make_group(const GroupSetup& setup) {
  meet_at_store(*setup.store, "mpi", setup.rank, setup.size(), setup.timeout);
  const std::string where = fmt::format(
      "new_group [rank {}/{}, group {}]", setup.rank, setup.size(), setup.name);
  const std::vector<int> ranks(
      setup.world_ranks.begin(), setup.world_ranks.end());
  MPI_Group everyone = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  {
    const MpiTurn turn;
    check_mpi(MPI_Comm_group(communicator_, &everyone), where);
    check_mpi(
        MPI_Group_incl(
            everyone, static_cast<int>(ranks.size()), ranks.data(), &members),
        where);
    check_mpi(MPI_Comm_create_group(communicator_, members, 0, &made), where);
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    MPI_Group_free(&members);
    MPI_Group_free(&everyone);
  }
  return make_mpi_collectives(
      std::make_shared<MpiGroup>(made, setup, shared_from_this()));
}

std::shared_ptr<MpiSession> open(const MpiSessionOptions& options) {
  start_mpi();
  auto session = std::make_shared<Session>(options);
  count_mpi_session(1);
  return session;
}

} // namespace
} // namespace tessera

extern "C" const tessera::MpiPlugin* tessera_mpi_plugin() {
  static const tessera::MpiPlugin plugin{
      .header = {}, .library = TESSERA_MPI_LIBRARY, .open = tessera::open};
  return &plugin;
}
