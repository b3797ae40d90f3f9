// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

// The root of everything that Tessera throws. A message reads: operation [rank,
// group, sequence]: got, expected; remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller asked for something that cannot be done: wrong options, shapes
// that do not fit, a forbidden combination.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A peer stayed away past the timeout.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// A peer died, or called something else than this rank.
class PeerError : public Error {
 public:
  using Error::Error;
};

// The operating system refused a file, a socket or memory.
class IoError : public Error {
 public:
  using Error::Error;
};

// Data that was read does not hold what it must.
class CorruptionError : public Error {
 public:
  using Error::Error;
};

} // namespace tessera
