// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {

// A file with the given bytes that goes away with this object.
class TestFile {
 public:
  explicit TestFile(
      const std::string& bytes, const std::string& ending = ".txt") {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() /
        ("tessera_test_" + std::to_string(::getpid()) + "_" +
         std::to_string(count++) + ending);
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~TestFile() {
    std::filesystem::remove(path_);
  }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;

  std::string path() const {
    return path_.string();
  }

 private:
  std::filesystem::path path_;
};

} // namespace tessera
