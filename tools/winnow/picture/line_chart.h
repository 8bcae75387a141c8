// Lines over a horizontal axis, with ticks, a grid and a name at the end of every line.
#pragma once

#include <string>
#include <vector>

#include "tools/winnow/picture/image.h"

namespace winnow::picture {

struct Line {
  std::string name;
  Color color;
  double thickness = 2.5;
  std::vector<Point> points;  // in the units of the axes; points that are not finite are left out
};

// A dashed horizontal line to compare with.
struct Level {
  std::string name;
  Color color;
  double value = 0;
};

struct LineChart {
  std::string title;
  std::string subtitle;
  std::string x_title;
  bool percent = false;  // y from 0 to 1, written as 0 % to 100 %
  std::vector<Line> lines;
  std::vector<Level> levels;
};

// Draws the chart into the box, its titles and names included. y begins at 0.
void draw_line_chart(Image& image, Box box, const LineChart& chart);

// 1, 2 or 5 times a power of ten, so that about `count` steps make up `range`.
double tick_step(double range, int count);

}  // namespace winnow::picture
