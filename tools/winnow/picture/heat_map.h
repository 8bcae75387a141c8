// A square grid of coloured cells with a character for every row and column.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/winnow/picture/image.h"

namespace winnow::picture {

struct HeatMap {
  std::string title;
  std::string subtitle;
  std::string x_title;
  std::string y_title;
  std::vector<std::string> labels;  // of the columns, and again of the rows
  // The colour of a cell; absent cells (above the diagonal, say) return the background.
  std::function<Color(int row, int column)> color;
  double cell = 12;  // pixels
};

// Space that a map takes, its titles and labels included.
Box heat_map_extent(const HeatMap& map);

// Draws the map with the upper left corner of its extent at `corner`.
void draw_heat_map(Image& image, Point corner, const HeatMap& map);

// A bar of `scale` colours from 0 to 1 with labels below, spread evenly from end to end.
void draw_color_bar(Image& image, Box bar, const std::string& title,
                    const std::function<Color(double)>& scale,
                    const std::vector<std::string>& labels);

}  // namespace winnow::picture
