// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace tessera::cli {

// Another program that is spoken to by lines: through its standard input and
// output. Its errors go to this program's. It is killed when this program dies.
class LineProcess {
 public:
  // `name` stands in errors. `environment` as of environment_with(). Throws
  // IoError.
  LineProcess(
      std::string name,
      const std::vector<std::string>& command,
      const std::vector<std::string>& environment);
  // Kills it, if it is still there.
  ~LineProcess();
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  // Without the newline. Throws IoError when the process has ended.
  void write_line(const std::string& line);

  // The next line that begins with '{'; others are passed over. Blocks. Throws
  // IoError when the process ends before.
  std::string read_line();

  void close_input();
  // Returns when it has closed its output, or at the latest after `limit`.
  void await_end(std::chrono::milliseconds limit);

  const std::string& name() const {
    return name_;
  }

 private:
  bool receive(int limit_ms); // false: at its end, or nothing in that time
  [[noreturn]] void throw_ended();
  int reap(); // its status

  std::string name_;
  pid_t pid_ = -1;
  int in_ = -1; // where its input is written
  int out_ = -1; // where its output is read
  std::string received_;
};

} // namespace tessera::cli
