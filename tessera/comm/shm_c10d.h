// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/group.h>
#include <tessera/comm/shm_engine.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

// The engine as c10d sees it: every collective blocks and returns a Work that
// is done; send and recv return at once.
c10::intrusive_ptr<c10d::Backend> make_shm_c10d_backend(
    std::shared_ptr<ShmEngine> engine, int64_t rank, int64_t size);

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
