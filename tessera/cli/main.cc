// SPDX-License-Identifier: Apache-2.0
#include <tessera/cli/program.h>

int main(int argc, char** argv) {
  return tessera::cli::run_program(argc, argv);
}
