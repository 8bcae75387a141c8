#include "tools/winnow/demo/picture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"

namespace winnow::picture {
namespace {

using demo::format_text;
using Align = Image::Align;

constexpr double kTitleSize = 24;
constexpr double kTextSize = 17;
constexpr double kEm = 0.86;  // of the height of a line, in DejaVu Sans

std::string code(Color color) {
  return format_text("#%02x%02x%02x", color.red, color.green, color.blue);
}

std::string escaped(std::string_view text) {
  std::string result = cli::printable(text);
  // XML forbids the last two.
  for (const auto& [from, to] :
       {std::pair{"&", "&amp;"}, {"<", "&lt;"}, {"\ufffe", "\u25a1"}, {"\uffff", "\u25a1"}}) {
    for (std::size_t at = 0; (at = result.find(from, at)) != result.npos; ++at) {
      result.replace(at, std::strlen(from), to);
    }
  }
  return result;
}

Color along(std::span<const Color> colors, double value) {
  const double place = value > 0 ? std::min(value, 1.0) * double(colors.size() - 1) : 0;
  const std::size_t index = std::min(std::size_t(place), colors.size() - 2);
  const Color from = colors[index], to = colors[index + 1];
  const auto mix = [&](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * (place - double(index))));
  };
  return {mix(from.red, to.red), mix(from.green, to.green), mix(from.blue, to.blue)};
}

}  // namespace

Color heat_color(double value) {
  static constexpr Color kHeat[] = {{252, 250, 238}, {254, 224, 144}, {250, 164, 84},
                                    {226, 88, 61},   {158, 33, 84},   {62, 12, 74}};
  return along(kHeat, value);
}

Color cold_color(double value) {
  static constexpr Color kCold[] = {
      {246, 248, 250}, {198, 216, 232}, {125, 165, 204}, {49, 101, 161}};
  return along(kCold, value);
}

Image::Image(int width, int height)
    : width_(width),
      height_(height),
      body_(format_text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                        "viewBox=\"0 0 %d %d\" font-family=\"DejaVu Sans, Verdana, sans-serif\">\n"
                        "<style>path{shape-rendering:crispEdges}</style>\n",
                        width, height, width, height)) {
  fill({0, 0, double(width), double(height)}, kWhite);
}

void Image::fill(Box box, Color color) {
  body_ += format_text("<path fill=\"%s\" d=\"M%g %gh%gv%gh%gz\"/>\n", code(color).c_str(), box.x,
                       box.y, box.width, box.height, -box.width);
}

void Image::frame(Box box, Color color) {
  body_ += format_text("<path fill=\"none\" stroke=\"%s\" d=\"M%g %gh%gv%gh%gz\"/>\n",
                       code(color).c_str(), box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1,
                       1 - box.width);
}

void Image::line(std::span<const Point> points, double thickness, Color color, double dash) {
  body_ += format_text(
      "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" "
      "stroke-linejoin=\"round\" stroke-dasharray=\"%g\" points=\"",
      code(color).c_str(), thickness, dash);
  for (const Point& point : points) body_ += format_text("%.2f,%.2f ", point.x, point.y);
  body_ += "\"/>\n";
}

void Image::text(Point anchor, std::string_view text, double size, Color color, Align align,
                 bool upwards) {
  static constexpr const char* kAnchors[] = {"start", "middle", "end"};
  body_ += format_text(
      "<text fill=\"%s\" font-size=\"%g\" text-anchor=\"%s\" transform=\"translate(%g %g)%s\">",
      code(color).c_str(), kEm * size, kAnchors[int(align)], anchor.x, anchor.y,
      upwards ? " rotate(-90)" : "");
  body_ += escaped(text) + "</text>\n";
}

namespace {

constexpr double kMapLeft = 52;  // axis title and labels
constexpr double kMapTop = 66;   // title and subtitle
constexpr double kMapBottom = 52;

}  // namespace

Box heat_map_extent(const HeatMap& map) {
  const double side = map.cell * double(map.labels.size());
  return {0, 0, kMapLeft + side, kMapTop + side + kMapBottom};
}

void draw_heat_map(Image& image, Point corner, const HeatMap& map) {
  const int count = static_cast<int>(map.labels.size());
  const double side = map.cell * count;
  const double left = corner.x + kMapLeft, top = corner.y + kMapTop;
  image.text({left, corner.y + 22}, map.title, kTitleSize, kInk);
  image.text({left, corner.y + 48}, map.subtitle, kTextSize, kGray);
  for (int row = 0; row < count; ++row) {
    for (int column = 0; column < count; ++column) {
      const Color color = map.color(row, column);
      if (color == kWhite) continue;
      image.fill({left + column * map.cell, top + row * map.cell, map.cell, map.cell}, color);
    }
  }
  image.frame({left - 1, top - 1, side + 2, side + 2}, kGray);
  const double label_size = map.cell + 2;
  for (int i = 0; i < count; ++i) {
    const double middle = (i + 0.5) * map.cell;
    image.text({left + middle, top + side + map.cell + 2}, map.labels[i], label_size, kInk,
               Align::middle);
    image.text({left - 6 - map.cell / 2, top + middle + map.cell * 0.38}, map.labels[i], label_size,
               kInk, Align::middle);
  }
  image.text({left + side / 2, top + side + kMapBottom - 12}, map.x_title, kTextSize, kGray,
             Align::middle);
  image.text({corner.x + 18, top + side / 2}, map.y_title, kTextSize, kGray, Align::middle, true);
}

void draw_color_bar(Image& image, Box bar, std::string_view title,
                    const std::function<Color(double)>& scale,
                    const std::vector<std::string>& labels) {
  constexpr double kStripe = 4;
  image.text({bar.x, bar.y - 10}, title, kTextSize, kInk);
  for (double x = 0; x < bar.width; x += kStripe) {
    image.fill({bar.x + x, bar.y, kStripe, bar.height}, scale((x + kStripe / 2) / bar.width));
  }
  image.frame(bar, kGray);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const double x = bar.x + bar.width * double(i) / double(labels.size() - 1);
    image.fill({x - 0.5, bar.y + bar.height, 1, 5}, kGray);
    image.text({x, bar.y + bar.height + 20}, labels[i], 15, kGray, Align::middle);
  }
}

double tick_step(double range, int count) {
  const double rough = range / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * 0.7) return factor * power;
  }
  return 10 * power;
}

void draw_line_chart(Image& image, Box box, const LineChart& chart) {
  constexpr double kLeft = 62, kTop = 74, kBottom = 58, kNames = 200, kNameDistance = 21;
  const Box plot = {box.x + kLeft, box.y + kTop, box.width - kLeft - kNames,
                    box.height - kTop - kBottom};
  const auto finite = [](Point p) { return std::isfinite(p.x) && std::isfinite(p.y); };
  double x_max = 0, y_max = 0;
  for (const auto* lines : {&chart.lines, &chart.levels}) {
    for (const Line& line : *lines) {
      for (const Point& point : line.points) {
        if (!finite(point)) continue;
        x_max = std::max(x_max, point.x);
        y_max = std::max(y_max, point.y);
      }
    }
  }
  if (x_max == 0) x_max = 1;
  y_max = chart.percent || y_max == 0 ? 1 : 1.06 * y_max;
  const auto x_of = [&](double x) { return plot.x + plot.width * x / x_max; };
  const auto y_of = [&](double y) { return plot.y + plot.height * (1 - y / y_max); };

  image.text({plot.x, box.y + 24}, chart.title, kTitleSize, kInk);
  image.text({plot.x, box.y + 50}, chart.subtitle, kTextSize, kGray);
  const double bottom = plot.y + plot.height;
  for (double y = 0; y <= y_max * 1.0001; y += tick_step(y_max, 5)) {
    image.fill({plot.x, std::round(y_of(y)), plot.width, 1}, kPale);
    image.text({plot.x - 10, y_of(y) + 6},
               chart.percent ? format_text("%.0f %%", 100 * y) : format_text("%g", y), kTextSize,
               kGray, Align::end);
  }
  for (double x = 0; x <= x_max * 1.0001; x += tick_step(x_max, 6)) {
    image.fill({std::round(x_of(x)), bottom, 1, 6}, kGray);
    image.text({x_of(x), bottom + 24}, format_text("%g", x), kTextSize, kGray, Align::middle);
  }
  image.fill({plot.x, bottom, plot.width, 1}, kGray);
  image.text({plot.x + plot.width / 2, bottom + 48}, chart.x_title, kTextSize, kGray,
             Align::middle);

  struct Name {
    const Line* line;
    double y;
  };
  std::vector<Name> names;
  for (const Line& level : chart.levels) {
    if (!finite(level.points.front())) continue;
    const double y = y_of(level.points.front().y);
    image.line({{{plot.x, y}, {plot.x + plot.width, y}}}, level.thickness, level.color, 7);
    names.push_back({&level, y});
  }
  for (const Line& line : chart.lines) {
    std::vector<Point> points;
    for (const Point& point : line.points) {
      if (finite(point)) points.push_back({x_of(point.x), y_of(point.y)});
    }
    if (points.empty()) continue;
    image.line(points, line.thickness, line.color);
    names.push_back({&line, points.back().y});
  }
  // Names that would overlap move apart, within the plot's height.
  std::ranges::sort(names, {}, &Name::y);
  double least = plot.y;
  for (Name& name : names) least = (name.y = std::max(name.y, least)) + kNameDistance;
  double most = bottom;
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    most = (name->y = std::min(name->y, most)) - kNameDistance;
  }
  for (const auto& [line, y] : names) {
    image.text({plot.x + plot.width + 10, y + 6}, line->name, kTextSize, line->color);
  }
}

}  // namespace winnow::picture
