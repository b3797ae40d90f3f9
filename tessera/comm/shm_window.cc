// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/shm_window.h>

#include <map>
#include <mutex>

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// The windows that this process made, so that its threads share one mapping
// (and one set of addresses for their atomics).
struct OwnWindows {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<ShmWindow>> by_address;
};

OwnWindows& own_windows() {
  static OwnWindows windows;
  return windows;
}

} // namespace

ShmWindow::Layout::Layout(int64_t size) : n(static_cast<std::size_t>(size)) {
  header_bytes =
      round_up(sizeof(CallHeader) + 2 * n * sizeof(int64_t), kCacheLine);
  members = round_up(sizeof(ShmControl), kCacheLine);
  headers = members + n * sizeof(ShmMember);
  offers = headers + 2 * n * header_bytes;
  channels = round_up(offers + 2 * n * kMaxLent * sizeof(ShmOffer), kCacheLine);
  rings = round_up(channels + n * n * sizeof(ShmChannel), kPage);
  inputs = rings + n * n * kChannelBytes;
  results = inputs + 2 * n * kChunkBytes;
  total = results + 2 * n * kChunkBytes;
}

std::shared_ptr<ShmWindow> ShmWindow::create(const Layout& layout) {
  auto memory = SharedMemory::create(layout.total);
  // Fresh pages are zero: every atomic begins at its first state.
  memory->commit(0, layout.total);
  std::shared_ptr<ShmWindow> window(new ShmWindow(std::move(memory), layout));
  OwnWindows& own = own_windows();
  const std::scoped_lock lock(own.mutex);
  std::erase_if(
      own.by_address, [](const auto& entry) { return entry.second.expired(); });
  own.by_address[window->memory_->address().text()] = window;
  return window;
}

std::shared_ptr<ShmWindow> ShmWindow::attach(
    const std::string& address, const Layout& layout) {
  {
    OwnWindows& own = own_windows();
    const std::scoped_lock lock(own.mutex);
    const auto found = own.by_address.find(address);
    auto window =
        found == own.by_address.end() ? nullptr : found->second.lock();
    if (window) {
      return window;
    }
  }
  const auto place = MemoryAddress::parse(address);
  if (place.bytes != layout.total) {
    throw CorruptionError(fmt::format(
        "shared window: rank 0 made {} bytes, expected {}; do all ranks run "
        "the same build?",
        place.bytes,
        layout.total));
  }
  return std::shared_ptr<ShmWindow>(
      new ShmWindow(SharedMemory::attach(place), layout));
}

std::shared_ptr<ShmWindow> ShmWindow::open(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    std::chrono::milliseconds timeout) {
  const Layout layout(size);
  std::shared_ptr<ShmWindow> window;
  if (rank == 0) {
    window = create(layout);
    store->set("window", window->memory_->address().text());
  } else {
    window = attach(wait_for_key(*store, "window", timeout), layout);
  }
  meet_at_store(*store, "mapped", rank, size, timeout);
  if (rank == 0) { // all have mapped it: the last way to reach it goes
    window->memory_->seal_off();
  }
  return window;
}

} // namespace tessera
