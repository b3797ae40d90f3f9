// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <tessera/base/error.h>
#include <tessera/comm/shared_memory.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tessera {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void throw_system_error(const std::string& what, int error) {
  throw IoError(
      fmt::format("shared memory: {}: {}", what, std::strerror(error)));
}

uint64_t random_number() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    throw_system_error("getrandom", errno);
  }
  return number;
}

std::string name_of(uint64_t nonce) {
  return fmt::format("tessera-{:016x}", nonce);
}

// A descriptor of fresh memory that only this user may open. Containers may
// forbid memfd_create; then a POSIX shared memory that loses its name at once.
int make_descriptor(uint64_t nonce) {
  const std::string name = name_of(nonce);
  int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0) {
    return fd;
  }
  const int memfd_error = errno;
  const std::string path = "/" + name;
  fd = shm_open(
      path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) {
    throw IoError(fmt::format(
        "shared memory: neither memfd_create ({}) nor POSIX shared memory in "
        "/dev/shm ({}) is allowed here; allow one of them, or use backend gloo",
        std::strerror(memfd_error),
        std::strerror(errno)));
  }
  shm_unlink(path.c_str());
  return fd;
}

// What an open descriptor means: "/memfd:tessera-... (deleted)".
std::string target_of(int fd) {
  std::array<char, 256> target{};
  const auto path = fmt::format("/proc/self/fd/{}", fd);
  const ssize_t length =
      readlink(path.c_str(), target.data(), target.size() - 1);
  return {
      target.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

void check_descriptor(int fd, const MemoryAddress& address) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    throw_system_error("fstat", errno);
  }
  const std::string target = target_of(fd);
  if (target.find(name_of(address.nonce)) == std::string::npos ||
      status.st_uid != geteuid() ||
      static_cast<uint64_t>(status.st_size) != address.bytes) {
    throw CorruptionError(fmt::format(
        "shared memory: process {} announced {} bytes named {}, its descriptor "
        "{} is '{}' of {} bytes; has that process ended, and do all ranks run "
        "the same build?",
        address.pid,
        address.bytes,
        name_of(address.nonce),
        address.fd,
        target,
        status.st_size));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & kSeals) != kSeals) {
    throw CorruptionError(fmt::format(
        "shared memory: {} of process {} may still change its size",
        target,
        address.pid));
  }
}

} // namespace

std::string MemoryAddress::text() const {
  return fmt::format("{} {} {} {:#x}", pid, fd, bytes, nonce);
}

MemoryAddress MemoryAddress::parse(const std::string& text) {
  MemoryAddress address;
  unsigned long long bytes = 0;
  unsigned long long nonce = 0;
  int end = 0;
  const int fields = std::sscanf(
      text.c_str(),
      "%d %d %llu 0x%llx%n",
      &address.pid,
      &address.fd,
      &bytes,
      &nonce,
      &end);
  if (fields != 4 || static_cast<std::size_t>(end) != text.size() ||
      address.pid <= 0 || address.fd < 0) {
    throw CorruptionError("shared memory: '" + text + "' is no address");
  }
  address.bytes = bytes;
  address.nonce = nonce;
  return address;
}

SharedMemory::SharedMemory(int fd, const MemoryAddress& address)
    : address_(address), fd_(fd) {
  void* memory = mmap(
      nullptr,
      address.bytes,
      PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_NORESERVE,
      fd,
      0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(fd);
    throw_system_error(
        fmt::format(
            "cannot map {} bytes (see ulimit -v and vm.max_map_count)",
            address.bytes),
        error);
  }
  data_ = static_cast<std::byte*>(memory);
  madvise(memory, address.bytes, MADV_HUGEPAGE); // where the system offers them
}

SharedMemory::~SharedMemory() {
  munmap(data_, address_.bytes);
  if (fd_ >= 0) {
    close(fd_);
  }
}

std::shared_ptr<SharedMemory> SharedMemory::create(std::size_t bytes) {
  MemoryAddress address{
      .pid = getpid(), .bytes = bytes, .nonce = random_number()};
  address.fd = make_descriptor(address.nonce);
  if (fchmod(address.fd, S_IRUSR | S_IWUSR) != 0 ||
      ftruncate(address.fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(address.fd);
    throw_system_error(
        fmt::format("cannot make {} bytes (see ulimit -f)", bytes), error);
  }
  fcntl(address.fd, F_ADD_SEALS, kSeals); // POSIX shared memory has none
  return std::shared_ptr<SharedMemory>(new SharedMemory(address.fd, address));
}

std::shared_ptr<SharedMemory> SharedMemory::attach(
    const MemoryAddress& address) {
  const auto path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    throw_system_error(
        path +
            " (ranks on one machine must run as one user, in one PID "
            "namespace; else use backend gloo)",
        errno);
  }
  try {
    check_descriptor(fd, address);
  } catch (...) {
    close(fd);
    throw;
  }
  std::shared_ptr<SharedMemory> memory(new SharedMemory(fd, address));
  close(std::exchange(memory->fd_, -1));
  return memory;
}

void SharedMemory::commit(std::size_t offset, std::size_t bytes) const {
  if (bytes == 0 || madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  int error = errno;
  if (error == EINVAL) { // kernels before 5.14
    error = posix_fallocate(
        fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
  if (error != 0) {
    // A range that cannot be had shows as a fault.
    throw_system_error(
        fmt::format(
            "no room for {} bytes (see the memory limit of the container and "
            "the size of /dev/shm)",
            bytes),
        error == EFAULT ? ENOSPC : error);
  }
}

void SharedMemory::release(std::size_t offset, std::size_t bytes) const {
  fallocate(
      fd_,
      FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
      static_cast<off_t>(offset),
      static_cast<off_t>(bytes));
}

void SharedMemory::seal_off() {
  if (fd_ >= 0) {
    close(std::exchange(fd_, -1));
  }
}

} // namespace tessera
