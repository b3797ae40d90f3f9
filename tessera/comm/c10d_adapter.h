// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/collectives.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

// Any backend's collectives as c10d sees them. A call returns the backend's own
// Work; where c10d wants the data in another form, it takes that form in
// wait(), or when the Work is first seen to be done.
c10::intrusive_ptr<c10d::Backend> make_c10d_backend(
    const std::string& name,
    std::shared_ptr<Collectives> collectives,
    int64_t rank,
    int64_t size);

// The same work, and what follows it: `last` runs once, in wait() or when the
// work is first seen to be done.
WorkPtr then(WorkPtr work, std::function<void()> last);

} // namespace tessera
