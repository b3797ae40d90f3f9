// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <tessera/base/error.h>
#include <tessera/comm/loopback.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {

bool is_loopback(const std::string& address) {
  in_addr four{};
  if (inet_pton(AF_INET, address.c_str(), &four) == 1) {
    return (ntohl(four.s_addr) >> 24) == 127;
  }
  return address == "localhost" || address == "::1";
}

int listen_on_loopback(const std::string& address, uint16_t port) {
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(port);
  if (inet_pton(AF_INET, address.c_str(), &four.sin_addr) != 1) {
    four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(port);
  six.sin6_addr = in6addr_loopback;
  const bool is_six = address == "::1";
  const int fd =
      socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  const auto* where = is_six ? reinterpret_cast<const sockaddr*>(&six)
                             : reinterpret_cast<const sockaddr*>(&four);
  const socklen_t length = is_six ? sizeof(six) : sizeof(four);
  if (fd < 0 ||
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
      bind(fd, where, length) != 0 || listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    if (fd >= 0) {
      close(fd);
    }
    throw IoError(fmt::format(
        "init: listening on {}:{}: {}; choose another MASTER_PORT",
        address,
        port,
        std::strerror(error)));
  }
  return fd;
}

} // namespace tessera
