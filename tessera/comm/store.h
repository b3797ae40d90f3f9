// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

// Where rank 0 serves the store of a job.
struct StoreAddress {
  std::string host;
  uint16_t port = 0; // 0: any that is free
};

// Serves a store at the address, whose port becomes the one that was taken, and
// returns this rank's handle of it. Listens on that address alone; on all when
// it is not one of this machine, but leads here. Throws IoError.
c10::intrusive_ptr<c10d::Store> serve_store(
    StoreAddress& address, std::chrono::milliseconds timeout);

// A handle of the store that another process serves, or will soon. Throws
// IoError.
c10::intrusive_ptr<c10d::Store> join_store(
    const StoreAddress& address, std::chrono::milliseconds timeout);

// An address by which other machines reach this one, as far as it can tell: of
// its host name, else of the first interface that is up.
std::string own_address();

} // namespace tessera
