// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

// "dp=2,tp=4" -> the axes in order. Throws UsageError that says how to write
// it: names are letters, digits and '_', not twice the same, sizes at least 1.
std::vector<Axis> parse_mesh(const std::string& text);

int64_t ranks_of(const std::vector<Axis>& axes);

// Throws UsageError that suggests a mesh when the axes do not make `ranks`
// ranks.
void check_mesh(
    const std::string& text, const std::vector<Axis>& axes, int64_t ranks);

} // namespace tessera::cli
