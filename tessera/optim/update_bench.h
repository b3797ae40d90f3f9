// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/base/bench_row.h>

#include <vector>

namespace tessera {

// The update alone, 50 million parameters: one pass of every rule over a flat
// buffer, against torch::optim::AdamW on 100 tensors and at::_fused_adamw_ on
// one flat tensor, with one thread and with two.
std::vector<BenchRow> measure_updates();

} // namespace tessera
