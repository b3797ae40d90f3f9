// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

// Text in columns: the first left-aligned, the others right-aligned, a line
// under the head.
class Table {
 public:
  explicit Table(std::vector<std::string> head);
  void add(std::vector<std::string> row); // missing cells are empty
  std::string str() const; // lines end with '\n'

 private:
  std::vector<std::vector<std::string>> rows_;
};

// 12345 -> "12,345".
std::string with_commas(double value);

// Seconds as "0:07", "12:34" or "1:02:03".
std::string clock_text(double seconds);

} // namespace tessera::cli
