// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>

#include <exception>
#include <iostream>

namespace {

int run(int argc, char** argv) {
  CLI::App app("Distributed training for C++ on libtorch.", "tessera");
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  std::cout << app.help();
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << '\n';
    return 1;
  }
}
