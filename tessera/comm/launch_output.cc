// SPDX-License-Identifier: Apache-2.0
#include <tessera/comm/launch_output.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera {
namespace {

constexpr std::size_t kLongestLine = 64 << 10; // longer ones are cut in pieces
constexpr std::size_t kTail = 8 << 10;

} // namespace

void write_all(int target, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(target, text.data(), text.size());
    if (written < 0 && errno != EINTR && errno != EAGAIN) {
      return; // nobody reads any more
    }
    text.remove_prefix(
        written > 0 ? static_cast<std::size_t>(written) : std::size_t{0});
  }
}

void LineForwarder::add(std::string_view text) {
  rest_ += text;
  std::size_t begin = 0;
  for (auto end = rest_.find('\n'); end != std::string::npos;
       end = rest_.find('\n', begin)) {
    write_line(std::string_view(rest_).substr(begin, end + 1 - begin));
    begin = end + 1;
  }
  rest_.erase(0, begin);
  if (rest_.size() >= kLongestLine) {
    finish();
  }
}

void LineForwarder::finish() {
  if (!rest_.empty()) {
    write_line(rest_ + "\n");
    rest_.clear();
  }
}

void LineForwarder::write_line(std::string_view line) const {
  write_all(target_, prefix_ + std::string(line));
}

void TailKeeper::add(std::string_view text) {
  tail_ += text;
  if (tail_.size() > kTail) {
    tail_.erase(0, tail_.size() - kTail);
  }
}

std::string last_lines(std::string_view text, std::size_t count) {
  while (!text.empty() && text.back() == '\n') {
    text.remove_suffix(1);
  }
  std::size_t begin = text.size();
  for (std::size_t line = 0; line < count && begin > 0; ++line) {
    const auto newline = text.rfind('\n', begin - 1);
    begin = newline == std::string_view::npos ? 0 : newline;
  }
  text.remove_prefix(begin);
  std::string lines;
  while (!text.empty()) {
    text.remove_prefix(text.front() == '\n' ? 1 : 0);
    const auto end = std::min(text.find('\n'), text.size());
    lines.append("  ").append(text.substr(0, end)).append("\n");
    text.remove_prefix(end);
  }
  return lines;
}

} // namespace tessera
