// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/dtensor/exec_plan.h>
#include <tessera/dtensor/op_info.h>

namespace tessera {

// Counts a call of an operator without a rule, and names the operator at its
// first call in this world.
void count_fallback(const ExecPlan& plan, const OpInfo& info);

} // namespace tessera
