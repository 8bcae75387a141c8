// The curves of a training as an SVG picture.
#pragma once

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct Panel {
  std::string title, color;
  std::vector<double> values;  // one per step; NaN where there is none
};

// Panels below each other over a common axis of steps; `phases` are the names and first steps of
// the stretches.
class Plot {
 public:
  Plot(std::string title, std::vector<std::pair<std::string, std::size_t>> phases)
      : title_(std::move(title)), phases_(std::move(phases)) {}

  void write(const std::string& path, const std::vector<Panel>& panels) {
    const double height = kTop + kStride * static_cast<double>(panels.size()) + 30;
    svg_ << "<svg xmlns='http://www.w3.org/2000/svg' width='" << kWidth << "' height='" << height
         << "' font-family='sans-serif' font-size='13'>\n<rect width='100%' height='100%' "
            "fill='white'/>\n";
    text(kLeft, 28, title_, "#222", "start' font-size='18");
    for (std::size_t i = 0; i < panels.size(); ++i) {
      draw(panels[i], kTop + kStride * static_cast<double>(i));
    }
    svg_ << "</svg>\n";
    std::ofstream file(path);
    if (!(file << svg_.str()).flush()) throw std::runtime_error("cannot write " + path);
  }

 private:
  static constexpr double kWidth = 900, kLeft = 70, kRight = 870, kTop = 70;
  static constexpr double kHeight = 190, kStride = 260;

  void draw(const Panel& panel, double top) {
    const std::size_t steps = panel.values.size();
    double largest = 0;
    for (const double value : panel.values) {
      if (!std::isnan(value)) largest = std::max(largest, value);
    }
    const double unit = round_unit(largest),
                 limit = unit * std::max(1.0, std::ceil(largest / unit));
    const auto x = [&](std::size_t step) {
      return kLeft + (kRight - kLeft) * static_cast<double>(step) /
                         static_cast<double>(std::max<std::size_t>(steps, 2) - 1);
    };
    const auto y = [&](double value) { return top + kHeight * (1 - value / limit); };

    text(kLeft, top - 10, panel.title, panel.color, "start' font-weight='bold");
    for (double value = 0; value <= limit * 1.001; value += unit) {
      line(kLeft, y(value), kRight, y(value), "#ddd");
      std::ostringstream label;
      label << value;
      text(kLeft - 8, y(value) + 4, label.str(), "#555", "end");
    }
    for (const auto& [name, first] : phases_) {
      line(x(first), top, x(first), top + kHeight, "#999");
      text(x(first) + 5, top + kHeight + 18, name + " from step " + std::to_string(first), "#555",
           "start");
    }
    svg_ << "<path fill='none' stroke='" << panel.color << "' stroke-width='1.5' d='";
    bool pen_down = false;
    for (std::size_t step = 0; step < steps; ++step) {
      const double value = panel.values[step];
      if (!std::isnan(value)) {
        svg_ << (pen_down ? 'L' : 'M') << x(step) << ' ' << y(value) << ' ';
        pen_down = true;
      }
    }
    svg_ << "'/>\n";
  }

  // A round number that cuts the axis into two to five.
  static double round_unit(double largest) {
    if (!(largest > 0)) return 1;
    const double power = std::pow(10, std::floor(std::log10(largest)));
    const double leading = largest / power;
    return power * (leading > 4 ? 2 : leading > 2 ? 1 : leading > 1 ? 0.5 : 0.25);
  }

  void line(double x0, double y0, double x1, double y1, const char* color) {
    svg_ << "<line x1='" << x0 << "' y1='" << y0 << "' x2='" << x1 << "' y2='" << y1 << "' stroke='"
         << color << "'/>\n";
  }
  void text(double x, double y, const std::string& what, const std::string& color,
            const std::string& anchor) {
    svg_ << "<text x='" << x << "' y='" << y << "' fill='" << color << "' text-anchor='" << anchor
         << "'>" << what << "</text>\n";
  }

  std::string title_;
  std::vector<std::pair<std::string, std::size_t>> phases_;
  std::ostringstream svg_;
};
