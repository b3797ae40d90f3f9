// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/world.h>

#include <cstdint>
#include <map>
#include <string>

namespace tessera {

// How often each operator without a sharding rule ran on replicated inputs, in
// this world. Such operators are right on any mesh, but pay for gathering; each
// is named once per run on the log.
std::map<std::string, int64_t> fallback_counts(const World& world);
void reset_fallback_counts(const World& world);

} // namespace tessera
