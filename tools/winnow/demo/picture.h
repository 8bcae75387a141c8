// Pictures as SVG: text, rectangles and lines; and what the demo draws with them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::picture {

struct Color {
  std::uint8_t red = 0;
  std::uint8_t green = 0;
  std::uint8_t blue = 0;
  friend constexpr bool operator==(const Color&, const Color&) = default;
};

inline constexpr Color kWhite{255, 255, 255};
inline constexpr Color kInk{34, 40, 49};      // titles
inline constexpr Color kGray{95, 103, 112};   // labels, axes
inline constexpr Color kPale{226, 229, 233};  // grid lines

// From near white over yellow, orange and red to nearly black: lightness falls evenly, so that the
// order shows in gray, too. 0 <= value <= 1, others are clamped; NaN is like 0.
Color heat_color(double value);
// From near white to steel blue, for what is shown as missing.
Color cold_color(double value);

struct Point {
  double x = 0;
  double y = 0;
};

// In pixels; y grows downwards.
struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

class Image {
 public:
  Image(int width, int height);

  void fill(Box box, Color color);
  void frame(Box box, Color color);  // one pixel wide, inside the box
  // From point to point; `dash`: the length of dashes and of the gaps between them.
  void line(std::span<const Point> points, double thickness, Color color, double dash = 0);
  // One line whose baseline begins, has its middle or ends at `anchor`. `size` is the height of a
  // line. What no terminal should be sent is written as cli::printable() does.
  enum class Align { start, middle, end };
  void text(Point anchor, std::string_view text, double size, Color color,
            Align align = Align::start, bool upwards = false);

  int width() const { return width_; }
  int height() const { return height_; }
  std::string svg() const { return body_ + "</svg>\n"; }

 private:
  int width_;
  int height_;
  std::string body_;
};

// A square grid of coloured cells with a character for every row and column.
struct HeatMap {
  std::string title;
  std::string subtitle;
  std::string x_title;
  std::string y_title;
  std::vector<std::string> labels;                  // of the columns, and again of the rows
  std::function<Color(int row, int column)> color;  // white: no cell
  double cell = 12;                                 // pixels
};
// Space that a map takes, its titles and labels included.
Box heat_map_extent(const HeatMap& map);
// Draws the map with the upper left corner of its extent at `corner`.
void draw_heat_map(Image& image, Point corner, const HeatMap& map);

// A bar of `scale` colours from 0 to 1 with labels below, spread evenly from end to end.
void draw_color_bar(Image& image, Box bar, std::string_view title,
                    const std::function<Color(double)>& scale,
                    const std::vector<std::string>& labels);

struct Line {
  std::string name;
  Color color;
  double thickness;
  std::vector<Point> points;  // in the units of the axes; points that are not finite are left out
};

// Lines, each with its name at its end, over axes that begin at 0.
struct LineChart {
  std::string title;
  std::string subtitle;
  std::string x_title;
  bool percent = false;  // y from 0 to 1, written as 0 % to 100 %
  std::vector<Line> lines;
  std::vector<Line> levels;  // dashed and horizontal, at the y of their only point
};
// Draws the chart into the box, its titles and names included.
void draw_line_chart(Image& image, Box box, const LineChart& chart);

// 1, 2 or 5 times a power of ten, so that about `count` steps make up `range`.
double tick_step(double range, int count);

}  // namespace winnow::picture
