// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>
#include <tessera/comm/shm_engine.h>

#include <memory>

namespace tessera {

// Messages of the engine as Works: they return at once.
WorkPtr shm_send(
    const std::shared_ptr<ShmEngine>& engine,
    const at::Tensor& tensor,
    int64_t peer,
    int tag);
WorkPtr shm_recv(
    const std::shared_ptr<ShmEngine>& engine,
    const at::Tensor& tensor,
    int64_t peer,
    int tag);

} // namespace tessera
