#include "tools/winnow/picture/line_chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/winnow/picture/text.h"

namespace winnow::picture {
namespace {

constexpr double kTitleSize = 24;
constexpr double kTextSize = 17;
constexpr double kLeft = 62;
constexpr double kRight = 200;  // names
constexpr double kTop = 74;
constexpr double kBottom = 58;
constexpr double kNameDistance = 21;

bool finite(Point point) { return std::isfinite(point.x) && std::isfinite(point.y); }

std::string number(double value, bool percent) {
  char text[32];
  if (percent) {
    std::snprintf(text, sizeof text, "%.0f %%", 100 * value);
  } else {
    std::snprintf(text, sizeof text, "%g", std::fabs(value) < 1e-12 ? 0.0 : value);
  }
  return text;
}

// From chart units to pixels.
struct Axes {
  Box plot;
  double x_max = 1;
  double y_max = 1;
  Point place(Point point) const {
    return {plot.x + plot.width * point.x / x_max, plot.y + plot.height * (1 - point.y / y_max)};
  }
};

Axes fit_axes(Box box, const LineChart& chart) {
  Axes axes;
  axes.plot = {std::round(box.x + kLeft), std::round(box.y + kTop),
               std::round(box.width - kLeft - kRight), std::round(box.height - kTop - kBottom)};
  double x_max = 0, y_max = 0;
  for (const Line& line : chart.lines) {
    for (const Point& point : line.points) {
      if (!finite(point)) continue;
      x_max = std::max(x_max, point.x);
      y_max = std::max(y_max, point.y);
    }
  }
  for (const Level& level : chart.levels) {
    if (std::isfinite(level.value)) y_max = std::max(y_max, level.value);
  }
  axes.x_max = x_max > 0 ? x_max : 1;
  axes.y_max = chart.percent ? 1 : y_max > 0 ? 1.06 * y_max : 1;
  return axes;
}

void draw_axes(Image& image, const Axes& axes, const LineChart& chart) {
  const Box& plot = axes.plot;
  const double y_step = tick_step(axes.y_max, 5);
  for (double y = 0; y <= axes.y_max * 1.0001; y += y_step) {
    const double at = std::round(axes.place({0, y}).y);
    image.fill({plot.x, at, plot.width, 1}, kPale);
    draw_text(image, {plot.x - 10, at + 6}, number(y, chart.percent), kTextSize, kGray,
              Align::right);
  }
  const double x_step = tick_step(axes.x_max, 6);
  for (double x = 0; x <= axes.x_max * 1.0001; x += x_step) {
    const double at = std::round(axes.place({x, 0}).x);
    image.fill({at, plot.y + plot.height, 1, 6}, kGray);
    draw_text(image, {at, plot.y + plot.height + 24}, number(x, false), kTextSize, kGray,
              Align::center);
  }
  image.fill({plot.x, plot.y + plot.height, plot.width, 1}, kGray);
  draw_text(image, {plot.x + plot.width / 2, plot.y + plot.height + 48}, chart.x_title, kTextSize,
            kGray, Align::center);
}

struct Name {
  std::string text;
  Color color;
  double y = 0;
};

// Moves names apart that would overlap, and keeps them within the plot's height.
void spread(std::vector<Name>& names, double top, double bottom) {
  std::sort(names.begin(), names.end(), [](const Name& a, const Name& b) { return a.y < b.y; });
  double least = top;
  for (Name& name : names) {
    name.y = std::max(name.y, least);
    least = name.y + kNameDistance;
  }
  double most = bottom;
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    name->y = std::min(name->y, most);
    most = name->y - kNameDistance;
  }
}

}  // namespace

double tick_step(double range, int count) {
  const double rough = range / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * 0.7) return factor * power;
  }
  return 10 * power;
}

void draw_line_chart(Image& image, Box box, const LineChart& chart) {
  const Axes axes = fit_axes(box, chart);
  const Box& plot = axes.plot;
  draw_text(image, {plot.x, box.y + 24}, chart.title, kTitleSize, kInk);
  draw_text(image, {plot.x, box.y + 50}, chart.subtitle, kTextSize, kGray);
  draw_axes(image, axes, chart);
  std::vector<Name> names;
  for (const Level& level : chart.levels) {
    if (!std::isfinite(level.value)) continue;
    const double y = axes.place({0, level.value}).y;
    image.dashed_line({plot.x, y}, {plot.x + plot.width, y}, 1.6, level.color, 7);
    names.push_back({level.name, level.color, y});
  }
  for (const Line& line : chart.lines) {
    const Point* previous = nullptr;
    for (const Point& point : line.points) {
      if (!finite(point)) continue;
      const Point here = axes.place(point);
      image.line(previous != nullptr ? axes.place(*previous) : here, here, line.thickness,
                 line.color);
      previous = &point;
    }
    if (previous != nullptr) {
      names.push_back({line.name, line.color, axes.place(*previous).y});
    }
  }
  spread(names, plot.y, plot.y + plot.height);
  for (const Name& name : names) {
    draw_text(image, {plot.x + plot.width + 10, name.y + 6}, name.text, kTextSize, name.color);
  }
}

}  // namespace winnow::picture
