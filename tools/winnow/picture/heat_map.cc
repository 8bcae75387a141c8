#include "tools/winnow/picture/heat_map.h"

#include "tools/winnow/picture/text.h"

namespace winnow::picture {
namespace {

constexpr double kTitleSize = 24;
constexpr double kSubtitleSize = 17;
constexpr double kAxisTitleSize = 17;
constexpr double kLeft = 52;  // axis title and labels
constexpr double kTop = 66;   // title and subtitle
constexpr double kBottom = 52;

}  // namespace

Box heat_map_extent(const HeatMap& map) {
  const double side = map.cell * double(map.labels.size());
  return {0, 0, kLeft + side, kTop + side + kBottom};
}

void draw_heat_map(Image& image, Point corner, const HeatMap& map) {
  const int count = static_cast<int>(map.labels.size());
  const double side = map.cell * count;
  const double left = corner.x + kLeft, top = corner.y + kTop;
  draw_text(image, {left, corner.y + 22}, map.title, kTitleSize, kInk);
  draw_text(image, {left, corner.y + 48}, map.subtitle, kSubtitleSize, kGray);
  for (int row = 0; row < count; ++row) {
    for (int column = 0; column < count; ++column) {
      image.fill({left + column * map.cell, top + row * map.cell, map.cell, map.cell},
                 map.color(row, column));
    }
  }
  image.frame({left - 1, top - 1, side + 2, side + 2}, kGray);
  const double label_size = map.cell + 2;
  for (int i = 0; i < count; ++i) {
    const double middle = (i + 0.5) * map.cell;
    draw_text(image, {left + middle, top + side + map.cell + 2}, map.labels[i], label_size, kInk,
              Align::center);
    draw_text(image, {left - 6 - map.cell / 2, top + middle + map.cell * 0.38}, map.labels[i],
              label_size, kInk, Align::center);
  }
  draw_text(image, {left + side / 2, top + side + kBottom - 12}, map.x_title, kAxisTitleSize, kGray,
            Align::center);
  draw_text_upwards(image, {corner.x + 18, top + side / 2}, map.y_title, kAxisTitleSize, kGray,
                    Align::center);
}

void draw_color_bar(Image& image, Box bar, const std::string& title,
                    const std::function<Color(double)>& scale,
                    const std::vector<std::string>& labels) {
  draw_text(image, {bar.x, bar.y - 10}, title, kSubtitleSize, kInk);
  for (int x = 0; x < int(bar.width); ++x) {
    image.fill({bar.x + x, bar.y, 1, bar.height}, scale((x + 0.5) / bar.width));
  }
  image.frame(bar, kGray);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const double x = bar.x + bar.width * double(i) / double(labels.size() - 1);
    image.fill({x - 0.5, bar.y + bar.height, 1, 5}, kGray);
    draw_text(image, {x, bar.y + bar.height + 20}, labels[i], 15, kGray, Align::center);
  }
}

}  // namespace winnow::picture
