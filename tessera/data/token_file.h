// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

// A file of tokens, memory-mapped and read-only: every byte of an ordinary file
// is a token, and a file named *.bin holds uint16 tokens, little-endian. Pages
// are read when they are touched, so that each rank reads its own part only.
// Thread-safe. The file must not shrink while it is open.
class TokenFile {
 public:
  // Throws IoError when the file cannot be opened or mapped, UsageError when it
  // is empty, a folder, or a .bin of an odd number of bytes.
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& path() const {
    return path_;
  }
  int64_t size() const { // in tokens
    return size_;
  }
  int64_t vocab_size() const { // tokens are smaller than this: 256 or 65536
    return token_bytes_ == 1 ? 256 : 65536;
  }

  // Writes tokens [offset, offset + out.size()) to `out`. Throws UsageError for
  // a range outside the file.
  void read(int64_t offset, std::span<int64_t> out) const;

 private:
  void map(int descriptor);

  std::string path_;
  const unsigned char* bytes_ = nullptr;
  int64_t token_bytes_ = 1;
  int64_t size_ = 0;
};

} // namespace tessera
