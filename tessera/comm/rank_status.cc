// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tessera/base/environment.h>
#include <tessera/base/error.h>
#include <tessera/comm/rank_status.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {
namespace {

std::size_t bytes_for(int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(RankStatus);
}

RankStatus* map(int fd, int64_t count) {
  void* memory = mmap(
      nullptr, bytes_for(count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<RankStatus*>(memory);
}

} // namespace

std::shared_ptr<RankStatus[]> make_rank_statuses(
    int64_t count, std::string& path) {
  const int fd = memfd_create("tessera-ranks", MFD_CLOEXEC);
  RankStatus* statuses = nullptr;
  if (fd >= 0 && fchmod(fd, S_IRUSR | S_IWUSR) == 0 &&
      ftruncate(fd, static_cast<off_t>(bytes_for(count))) == 0) {
    statuses = map(fd, count);
  }
  if (statuses == nullptr) {
    const int error = errno;
    if (fd >= 0) {
      close(fd);
    }
    throw IoError(
        fmt::format("launch: shared memory: {}", std::strerror(error)));
  }
  path = fmt::format("/proc/{}/fd/{}", getpid(), fd);
  return {statuses, [fd, count](RankStatus* memory) {
            munmap(memory, bytes_for(count));
            close(fd);
          }};
}

std::shared_ptr<RankStatus> find_rank_status(int64_t rank, int64_t count) {
  const auto path = environment(kRankStatusVariable);
  const int fd = path ? open(path->c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) {
    return nullptr; // no launcher of ours, or one that has gone
  }
  struct stat status {};
  RankStatus* statuses = nullptr;
  if (fstat(fd, &status) == 0 &&
      static_cast<std::size_t>(status.st_size) == bytes_for(count)) {
    statuses = map(fd, count);
  }
  close(fd);
  if (statuses == nullptr) {
    return nullptr;
  }
  return {statuses + rank, [statuses, count](RankStatus* /*own*/) {
            munmap(statuses, bytes_for(count));
          }};
}

} // namespace tessera
