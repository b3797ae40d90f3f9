// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// Passes one stream of a rank on, whole lines at a time, each with a prefix.
class LineForwarder {
 public:
  LineForwarder(int target, std::string prefix)
      : target_(target), prefix_(std::move(prefix)) {}

  void add(std::string_view text);
  void finish(); // writes what is left of an unfinished line

 private:
  void write_line(std::string_view line) const; // with its newline

  int target_; // file descriptor
  std::string prefix_;
  std::string rest_;
};

// Keeps the last part of a stream, for the case that its rank fails.
class TailKeeper {
 public:
  void add(std::string_view text);
  const std::string& tail() const {
    return tail_;
  }

 private:
  std::string tail_;
};

// The last `count` lines of a text, each with two spaces before it.
std::string last_lines(std::string_view text, std::size_t count);

// Writes all of `text`, whatever the file descriptor takes at a time.
void write_all(int target, std::string_view text);

} // namespace tessera
