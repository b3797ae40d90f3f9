// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

// "localhost", "127.0.0.1", "::1" and their like: an address that only this
// machine can reach.
bool is_loopback(const std::string& address);

// A socket that listens on this port of that loopback address and on no other.
// The caller owns it. Throws IoError.
int listen_on_loopback(const std::string& address, uint16_t port);

} // namespace tessera
