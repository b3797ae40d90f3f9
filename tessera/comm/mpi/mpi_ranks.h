// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/comm/world.h>

#include <string>

// What the ranks of the tests do; mpi_test.cc starts them.
namespace tessera {

// Counts and prints what does not hold.
void expect(bool holds, const std::string& what);
int failures();

// Every collective against what a plain computation says.
void check_everything(const World& world);

} // namespace tessera
