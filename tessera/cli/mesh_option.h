// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

// "dp=2,tp=4" -> the axes in order. Throws UsageError that says how to write
// it: names are letters, digits and '_', not twice the same, sizes at least 1;
// one of them may be -1: the ranks that the others leave.
std::vector<Axis> parse_mesh(const std::string& text);

// The ranks that the axes make; an axis of -1 counts as one.
int64_t ranks_of(const std::vector<Axis>& axes);

// The axes with a size of -1 filled in. Throws UsageError that suggests a mesh
// when they do not make `ranks` ranks.
std::vector<Axis> fit_mesh(
    const std::string& text, std::vector<Axis> axes, int64_t ranks);

} // namespace tessera::cli
