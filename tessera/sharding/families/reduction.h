// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/line.h>

#include <optional>
#include <vector>

namespace tessera::rules {

// The line of a reduction of operand 0 over the dims marked; contributions
// combine by `reduction`, without one those dims stay whole. Further operands
// receive the results (out=).
Line reduce_line(
    std::vector<Operand> operands,
    const std::vector<bool>& reduced,
    bool keep,
    std::optional<ReduceOp> reduction,
    int results);

// How the powers of a vector norm combine for the argument p (2 when absent);
// none when it must not be seen.
std::optional<ReduceOp> norm_reduction(const OpArg& p);

// Makes a reduction line that of a norm with p at schema position `p`:
// contributions are reduced and finished with the root right away.
void finish_norm(Line& line, int64_t p);

} // namespace tessera::rules
