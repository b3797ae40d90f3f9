// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tessera/base/error.h>
#include <tessera/data/token_file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera {
namespace {

[[noreturn]] void fail(const std::string& path, int error, const char* remedy) {
  throw IoError(
      fmt::format("data [{}]: {}; {}", path, std::strerror(error), remedy));
}

} // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  token_bytes_ = path.ends_with(".bin") ? 2 : 1;
  const int descriptor = ::open(
      path.c_str(),
      O_RDONLY | O_CLOEXEC); // NOLINT(cppcoreguidelines-pro-type-vararg)
  if (descriptor < 0) {
    fail(
        path,
        errno,
        "give the path of a text file, or of a .bin file of uint16 tokens");
  }
  try {
    map(descriptor);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  ::close(descriptor); // the mapping stays
}

void TokenFile::map(int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    fail(path_, errno, "is the file still there?");
  }
  if (!S_ISREG(status.st_mode)) {
    throw UsageError(fmt::format(
        "data [{}]: not an ordinary file; give the path of a text file, or of "
        "a .bin file",
        path_));
  }
  if (status.st_size == 0) {
    throw UsageError(fmt::format(
        "data [{}]: the file is empty; give one with text or tokens", path_));
  }
  if (status.st_size % token_bytes_ != 0) {
    throw UsageError(fmt::format(
        "data [{}]: {} bytes, expected an even number, since a .bin holds "
        "uint16 tokens; rename a text file to something else than .bin",
        path_,
        status.st_size));
  }
  size_ = status.st_size / token_bytes_;
  void* const mapped = ::mmap(
      nullptr,
      static_cast<size_t>(status.st_size),
      PROT_READ,
      MAP_SHARED,
      descriptor,
      0);
  if (mapped == MAP_FAILED) {
    fail(path_, errno, "the file could not be mapped into memory");
  }
  bytes_ = static_cast<const unsigned char*>(mapped);
}

TokenFile::~TokenFile() {
  ::munmap(
      const_cast<unsigned char*>(bytes_),
      static_cast<size_t>(size_ * token_bytes_)); // NOLINT
}

void TokenFile::read(int64_t offset, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (offset < 0 || offset > size_ || count > size_ - offset) {
    throw UsageError(fmt::format(
        "data [{}]: {} tokens from {} on asked for, the file has {}",
        path_,
        count,
        offset,
        size_));
  }
  const unsigned char* in = bytes_ + offset * token_bytes_;
  for (int64_t& token : out) {
    token = token_bytes_ == 1 ? in[0] : in[0] | in[1] << 8U;
    in += token_bytes_;
  }
}

} // namespace tessera
