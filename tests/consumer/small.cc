// SPDX-License-Identifier: Apache-2.0
#include <tessera/base/error.h>

#include <cstdio>

int main() {
  try {
    throw tessera::UsageError("small: one program, expected; go on");
  } catch (const tessera::Error& error) {
    std::puts(error.what());
  }
}
