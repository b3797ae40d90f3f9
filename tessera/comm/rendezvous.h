// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

// How ranks find each other over a store before they have a group. None of this
// is recorded as communication.

// The value under `key` once a peer has set it. Throws TimeoutError.
std::string wait_for_key(
    c10d::Store& store,
    const std::string& key,
    std::chrono::milliseconds timeout);

// Blocks until all `size` ranks have called it with this `name`, which is used
// once per store. Throws TimeoutError that names those who stayed away.
void meet_at_store(
    c10d::Store& store,
    const std::string& name,
    int64_t rank,
    int64_t size,
    std::chrono::milliseconds timeout);

// An exception's message; libtorch's without the stack.
std::string brief(const std::exception& error);

// What two ranks must share to be on one machine: host, boot and PID namespace.
std::string machine_identity();
std::string host_name();

} // namespace tessera
