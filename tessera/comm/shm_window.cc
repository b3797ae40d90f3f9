// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tessera/base/error.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/shm_window.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Byte offsets of the parts of a window of n ranks.
struct Layout {
  explicit Layout(int64_t size) : n(static_cast<std::size_t>(size)) {
    header_bytes =
        round_up(sizeof(CallHeader) + 2 * n * sizeof(int64_t), kCacheLine);
    members = round_up(sizeof(ShmControl), kCacheLine);
    headers = members + n * sizeof(ShmMember);
    channels = headers + 2 * n * header_bytes;
    rings = round_up(channels + n * n * sizeof(ShmChannel), kPage);
    inputs = rings + n * n * ShmWindow::kChannelBytes;
    results = inputs + 2 * n * ShmWindow::kChunkBytes;
    total = results + 2 * n * ShmWindow::kChunkBytes;
  }

  std::size_t n;
  std::size_t header_bytes;
  std::size_t members;
  std::size_t headers;
  std::size_t channels;
  std::size_t rings;
  std::size_t inputs;
  std::size_t results;
  std::size_t total;
};

[[noreturn]] void throw_system_error(const std::string& what) {
  throw IoError(
      fmt::format("shared window: {}: {}", what, std::strerror(errno)));
}

// The windows that this process made, so that its threads share one mapping
// (and one set of addresses for their atomics).
struct OwnWindows {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<ShmWindow>> by_path;
};

OwnWindows& own_windows() {
  static OwnWindows windows;
  return windows;
}

std::size_t index(int64_t rank, int64_t size, uint64_t parity) {
  return (parity % 2) * static_cast<std::size_t>(size) +
      static_cast<std::size_t>(rank);
}

} // namespace

std::size_t ShmWindow::bytes_for(int64_t size) {
  return Layout(size).total;
}

ShmWindow::ShmWindow(int fd, int64_t size) : size_(size) {
  void* memory =
      mmap(nullptr, bytes_for(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    throw_system_error(fmt::format("cannot map {} bytes", bytes_for(size)));
  }
  base_ = static_cast<std::byte*>(memory);
}

ShmWindow::~ShmWindow() {
  munmap(base_, bytes_for(size_));
}

std::shared_ptr<ShmWindow> ShmWindow::create(int64_t size, std::string& path) {
  const int fd = memfd_create("tessera", MFD_CLOEXEC);
  if (fd < 0) {
    throw_system_error("memfd_create");
  }
  if (fchmod(fd, S_IRUSR | S_IWUSR) != 0 ||
      ftruncate(fd, static_cast<off_t>(bytes_for(size))) != 0) {
    close(fd);
    throw_system_error(fmt::format("cannot make {} bytes", bytes_for(size)));
  }
  std::shared_ptr<ShmWindow> window(new ShmWindow(
      fd,
      size)); // fresh pages are zero: every atomic begins at its first state
  path = fmt::format("/proc/{}/fd/{}", getpid(), fd);
  OwnWindows& own = own_windows();
  const std::scoped_lock lock(own.mutex);
  std::erase_if(
      own.by_path, [](const auto& entry) { return entry.second.expired(); });
  own.by_path[path] = window;
  return window;
}

std::shared_ptr<ShmWindow> ShmWindow::attach(
    const std::string& path, int64_t size) {
  {
    OwnWindows& own = own_windows();
    const std::scoped_lock lock(own.mutex);
    const auto found = own.by_path.find(path);
    auto window = found == own.by_path.end() ? nullptr : found->second.lock();
    if (window) {
      return window;
    }
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    throw_system_error(
        path +
        " (ranks on one machine must run as one user, in one PID namespace; "
        "else use backend gloo)");
  }
  struct stat status {};
  if (fstat(fd, &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != bytes_for(size)) {
    close(fd);
    throw IoError(fmt::format(
        "shared window: {} has {} bytes, expected {}; do all ranks run the "
        "same build?",
        path,
        status.st_size,
        bytes_for(size)));
  }
  std::shared_ptr<ShmWindow> window(new ShmWindow(fd, size));
  close(fd);
  return window;
}

std::shared_ptr<ShmWindow> ShmWindow::open(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    std::chrono::milliseconds timeout) {
  std::string path;
  std::shared_ptr<ShmWindow> window;
  if (rank == 0) {
    window = create(size, path);
    store->set("window", path);
  } else {
    path = wait_for_key(*store, "window", timeout);
    window = attach(path, size);
  }
  meet_at_store(*store, "mapped", rank, size, timeout);
  if (rank == 0) { // all have mapped it: the last way to reach it goes
    close(std::stoi(path.substr(path.rfind('/') + 1)));
  }
  return window;
}

ShmControl& ShmWindow::control() const {
  return *std::launder(reinterpret_cast<ShmControl*>(base_));
}

ShmMember& ShmWindow::member(int64_t rank) const {
  return *std::launder(
      reinterpret_cast<ShmMember*>(at(Layout(size_).members)) + rank);
}

CallHeader& ShmWindow::header(int64_t rank, uint64_t parity) const {
  const Layout layout(size_);
  return *std::launder(reinterpret_cast<CallHeader*>(
      at(layout.headers + index(rank, size_, parity) * layout.header_bytes)));
}

int64_t* ShmWindow::counts(int64_t rank, uint64_t parity) const {
  return reinterpret_cast<int64_t*>(
      reinterpret_cast<std::byte*>(&header(rank, parity)) + sizeof(CallHeader));
}

std::byte* ShmWindow::input(int64_t rank, uint64_t parity) const {
  return at(Layout(size_).inputs + index(rank, size_, parity) * kChunkBytes);
}

std::byte* ShmWindow::result(int64_t rank, uint64_t parity) const {
  return at(Layout(size_).results + index(rank, size_, parity) * kChunkBytes);
}

ShmChannel& ShmWindow::channel(int64_t from, int64_t to) const {
  return *std::launder(
      reinterpret_cast<ShmChannel*>(at(Layout(size_).channels)) + from * size_ +
      to);
}

std::byte* ShmWindow::ring(int64_t from, int64_t to) const {
  return at(
      Layout(size_).rings +
      static_cast<std::size_t>(from * size_ + to) * kChannelBytes);
}

} // namespace tessera
