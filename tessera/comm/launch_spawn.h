// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera {

// This process's environment with `ours` in place of what has the same names:
// "NAME=value" each.
std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& ours);

struct Spawn {
  const std::vector<std::string>& command; // program (searched in PATH) and
                                           // arguments
  const std::vector<std::string>& environment;
  int out; // file descriptors that become its standard output and error
  int err;
  int in = -1; // and its standard input; -1: an empty one
};

// A process of the command in a process group of its own, killed when this one
// dies. `error` receives the errno of a command that cannot be run, else 0.
// Throws IoError.
pid_t spawn(const Spawn& spawn, int& error);

} // namespace tessera
