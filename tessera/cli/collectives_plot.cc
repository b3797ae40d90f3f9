// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/cli/bench_collectives.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>

namespace tessera::cli {
namespace {

constexpr double kPanelWidth = 320;
constexpr double kPanelHeight = 240;
constexpr double kMargin = 50;
constexpr std::array<std::string_view, 8> kColors = {
    "#1b6ca8",
    "#6bb3e0",
    "#c0392b",
    "#e59866",
    "#7d3c98",
    "#239b56",
    "#7f8c8d",
    "#b7950b"};

struct Point {
  double bytes;
  double us;
};
using Line = std::vector<Point>;
using Panel = std::map<std::string, Line>; // by backend

// "64KiB" -> 65536; 0: no size.
double bytes_of(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string_view unit(end);
  return unit == "KiB" ? number * 1024
      : unit == "MiB"  ? number * 1024 * 1024
                       : 0;
}

std::map<std::string, Panel> panels_of(const std::vector<BenchRow>& rows) {
  std::map<std::string, Panel> panels;
  for (const BenchRow& row : rows) {
    const auto first = row.name.find('/');
    const auto second = row.name.find('/', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const double bytes = bytes_of(row.name.substr(second + 1));
    if (bytes > 0 && row.value > 0) {
      panels[row.name.substr(first + 1, second - first - 1)]
            [row.name.substr(0, first)]
                .push_back({bytes, row.value});
    }
  }
  return panels;
}

// Powers of ten from the least to the largest, of one coordinate.
struct PlotAxis {
  double low = 1e300;
  double high = 0;

  void cover(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  void settle() {
    low = std::floor(std::log10(low));
    high = std::max(std::ceil(std::log10(high)), low + 1);
  }
  double position(double value, double extent) const { // after settle()
    return (std::log10(value) - low) / (high - low) * extent;
  }
};

std::string grid(const PlotAxis& bytes, const PlotAxis& us) {
  std::string text;
  for (int power = static_cast<int>(us.low); power <= us.high; ++power) {
    const double y =
        kPanelHeight - us.position(std::pow(10.0, power), kPanelHeight);
    text += fmt::format(
        "<path d='M0 {:.1f}H{}' stroke='#ddd'/><text x='-6' y='{:.1f}' "
        "text-anchor='end'>{:g} us</text>\n",
        y,
        kPanelWidth,
        y + 4,
        std::pow(10.0, power));
  }
  for (const auto& [value, label] :
       {std::pair{1024.0, "1 KiB"},
        std::pair{65536.0, "64 KiB"},
        std::pair{1048576.0, "1 MiB"},
        std::pair{67108864.0, "64 MiB"}}) {
    text += fmt::format(
        "<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>\n",
        bytes.position(value, kPanelWidth),
        kPanelHeight + 16,
        label);
  }
  return text;
}

std::string line(
    const Line& points,
    const PlotAxis& bytes,
    const PlotAxis& us,
    size_t color) {
  std::string path;
  for (const Point& point : points) {
    path += fmt::format(
        "{}{:.1f} {:.1f}",
        path.empty() ? 'M' : 'L',
        bytes.position(point.bytes, kPanelWidth),
        kPanelHeight - us.position(point.us, kPanelHeight));
  }
  return fmt::format(
      "<path d='{}' fill='none' stroke='{}' stroke-width='2'/>\n",
      path,
      kColors.at(color % kColors.size()));
}

} // namespace

std::string collectives_plot(const std::vector<BenchRow>& rows) {
  const auto panels = panels_of(rows);
  PlotAxis bytes;
  PlotAxis us;
  std::map<std::string, size_t> colors;
  for (const auto& [collective, panel] : panels) {
    for (const auto& [backend, points] : panel) {
      colors.emplace(backend, colors.size());
      for (const Point& point : points) {
        bytes.cover(point.bytes);
        us.cover(point.us);
      }
    }
  }
  bytes.settle();
  us.settle();
  std::string text;
  double x = kMargin + 20;
  for (const auto& [collective, panel] : panels) {
    text += fmt::format("<g transform='translate({},{})'>\n", x, kMargin);
    text += fmt::format("<text y='-10'>{}</text>\n", collective);
    text += grid(bytes, us);
    for (const auto& [backend, points] : panel) {
      text += line(points, bytes, us, colors.at(backend));
    }
    text += "</g>\n";
    x += kPanelWidth + kMargin + 20;
  }
  double y = kMargin + kPanelHeight + 50;
  for (const auto& [backend, color] : colors) {
    text += fmt::format(
        "<path d='M70 {0}h24' stroke='{1}' stroke-width='2'/><text x='100' "
        "y='{2}'>{3}</text>\n",
        y - 4,
        kColors.at(color % kColors.size()),
        y,
        backend);
    y += 18;
  }
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{:.0f}' height='{:.0f}' "
      "font-family='sans-serif' font-size='11'>\n<rect width='100%' "
      "height='100%' fill='white'/>\n{}</svg>\n",
      x,
      y,
      text);
}

} // namespace tessera::cli
