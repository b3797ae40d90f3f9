// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/cost_model.h>
#include <tessera/sharding/decision.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera {

// Decides how a call runs: the cheapest strategy of the operator's rule, ties
// towards the output more sharded; without a rule everything is replicated and
// `fallback` is set. Pure: depends on nothing but its arguments. Throws
// UsageError for calls that cannot be right.
Decision propagate(const OpCall& call, const CostModel& costs);

bool has_rule(std::string_view op);

// Schema positions of the float or Scalar arguments whose value decides (a
// norm's p). The dispatcher puts them in the cache's key.
std::vector<int64_t> deciding_args(std::string_view op);

} // namespace tessera
