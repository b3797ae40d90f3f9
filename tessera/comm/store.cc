// SPDX-License-Identifier: Apache-2.0
// libtorch's store listens on every interface when it opens its own socket, so
// the socket is opened here.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <tessera/base/error.h>
#include <tessera/comm/rendezvous.h>
#include <tessera/comm/store.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw IoError(fmt::format(
        "init: cannot find the host {}: {}", host, gai_strerror(error)));
  }
  return {found, &freeaddrinfo};
}

// A socket that listens there, or -1 with errno.
int listen_at(const sockaddr* address, socklen_t length) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return -1;
  }
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  constexpr int kBacklog = 2048;
  if (bind(fd, address, length) != 0 || listen(fd, kBacklog) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

int listen_anywhere(uint16_t port) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(port);
  return listen_at(reinterpret_cast<const sockaddr*>(&any), sizeof(any));
}

int open_listener(const StoreAddress& address) {
  const auto candidates = resolve(address.host, address.port);
  int fd = -1;
  for (const auto* one = candidates.get(); one != nullptr && fd < 0;
       one = one->ai_next) {
    fd = listen_at(one->ai_addr, one->ai_addrlen);
  }
  if (fd < 0 && errno == EADDRNOTAVAIL) {
    fd = listen_anywhere(address.port);
  }
  return fd;
}

uint16_t port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length);
  return ntohs(
      bound.ss_family == AF_INET6
          ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
          : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

c10d::TCPStoreOptions options_for(
    const StoreAddress& address, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

c10::intrusive_ptr<c10d::Store> connect(
    const StoreAddress& address, const c10d::TCPStoreOptions& options) {
  try {
    return c10::make_intrusive<c10d::TCPStore>(address.host, options);
  } catch (const std::exception& error) {
    throw IoError(fmt::format(
        "init: cannot reach the store at {}:{}; is rank 0 up and the port "
        "free? ({})",
        address.host,
        address.port,
        brief(error)));
  }
}

std::string text_of(const sockaddr* address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  const auto& own = *reinterpret_cast<const sockaddr_in*>(address);
  inet_ntop(AF_INET, &own.sin_addr, text.data(), text.size());
  return text.data();
}

bool is_reachable(const sockaddr* address) {
  constexpr uint32_t kLoopback = 127;
  return address != nullptr && address->sa_family == AF_INET &&
      ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >>
          24 !=
      kLoopback;
}

} // namespace

c10::intrusive_ptr<c10d::Store> serve_store(
    StoreAddress& address, std::chrono::milliseconds timeout) {
  const int fd = open_listener(address);
  if (fd < 0) {
    throw IoError(fmt::format(
        "init: cannot serve the store at {}:{}: {}; is the port free?",
        address.host,
        address.port,
        std::strerror(errno)));
  }
  address.port = port_of(fd);
  auto options = options_for(address, timeout);
  options.isServer = true;
  options.masterListenFd = fd; // closed with the store
  return connect(address, options);
}

c10::intrusive_ptr<c10d::Store> join_store(
    const StoreAddress& address, std::chrono::milliseconds timeout) {
  return connect(address, options_for(address, timeout));
}

std::string own_address() {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host_name().c_str(), nullptr, &hints, &found) == 0) {
    const AddressList named(found, &freeaddrinfo);
    for (const auto* one = found; one != nullptr; one = one->ai_next) {
      if (is_reachable(one->ai_addr)) {
        return text_of(one->ai_addr);
      }
    }
  }
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) == 0) {
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(
        interfaces, &freeifaddrs);
    for (const auto* one = interfaces; one != nullptr; one = one->ifa_next) {
      if ((one->ifa_flags & IFF_UP) != 0 && is_reachable(one->ifa_addr)) {
        return text_of(one->ifa_addr);
      }
    }
  }
  throw IoError(
      "init: this machine has no address that others could reach; set "
      "MASTER_ADDR");
}

} // namespace tessera
