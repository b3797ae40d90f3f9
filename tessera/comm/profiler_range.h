// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>
#include <tessera/comm/record.h>

#include <string>
#include <string_view>

namespace tessera {

// A named range in torch's profiler while it lives, "tessera::all_reduce dp".
// Without a profiler it costs a few nanoseconds: the name is put together only
// when somebody wants it.
class ProfilerRange {
 public:
  ProfilerRange(CollectiveKind kind, std::string_view detail)
      : ProfilerRange(name_of(kind), detail) {}
  explicit ProfilerRange(
      std::string_view operation, std::string_view detail = {})
      : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      std::string name("tessera::");
      name.append(operation);
      if (!detail.empty()) {
        name.append(" ").append(detail);
      }
      range_.before(std::string_view(name));
    }
  }

 private:
  at::RecordFunction range_;
};

} // namespace tessera
