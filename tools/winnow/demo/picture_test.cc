#include "tools/winnow/demo/picture.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace winnow::picture {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Color kRed{255, 0, 0};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Picture, TextCannotEndItsElement) {
  Image image(60, 60);
  image.text({1, 2}, "a<b> & \x1b[31m \xff \uffff \u2423", 24, kInk, Image::Align::end, true);
  EXPECT_THAT(image.svg(), AllOf(HasSubstr(">a&lt;b> &amp; \\x1b[31m \\xff \u25a1 \u2423</text>"),
                                 HasSubstr("text-anchor=\"end\""), HasSubstr("rotate(-90)")));
}

TEST(Picture, HeatColorsDarkenSteadily) {
  const auto light = [](Color c) { return 0.3 * c.red + 0.6 * c.green + 0.1 * c.blue; };
  for (int i = 0; i < 20; ++i) {
    EXPECT_GT(light(heat_color(i / 20.0)), light(heat_color((i + 1) / 20.0))) << i;
    EXPECT_GT(light(cold_color(i / 20.0)), light(cold_color((i + 1) / 20.0))) << i;
  }
  EXPECT_EQ(heat_color(-1), heat_color(0));
  EXPECT_EQ(heat_color(2), heat_color(1));
  EXPECT_EQ(heat_color(kNan), heat_color(0));
}

TEST(Picture, HeatMapColorsItsCells) {
  HeatMap map;
  map.labels = {"a", "b", "c"};
  map.cell = 20;
  map.color = [](int row, int column) { return row == 2 && column == 0 ? kRed : kWhite; };
  const Box extent = heat_map_extent(map);
  Image image(int(extent.width), int(extent.height));
  draw_heat_map(image, {0, 0}, map);
  const std::string svg = image.svg(), red = "fill=\"#ff0000\" d=\"M52 106h20v20h-20z\"";
  EXPECT_THAT(svg, HasSubstr(red));
  EXPECT_EQ(svg.find("#ff0000"), svg.rfind("#ff0000"));
}

TEST(Picture, TicksAreRound) {
  EXPECT_DOUBLE_EQ(tick_step(1.0, 5), 0.2);
  EXPECT_DOUBLE_EQ(tick_step(200, 6), 50);
  EXPECT_NEAR(tick_step(2.6, 5), 0.5, 1e-12);
}

TEST(Picture, ChartsLeaveOutWhatIsNotFinite) {
  LineChart chart;
  Image empty(600, 400);
  draw_line_chart(empty, {0, 0, 600, 400}, chart);
  EXPECT_THAT(empty.svg(), Not(HasSubstr("<polyline")));
  chart.lines.push_back({"line", kRed, 2, {{0, kNan}, {1, 1}, {kNan, 2}, {2, 2}}});
  chart.levels.push_back({"level", kInk, 1, {{0, kNan}}});
  Image image(600, 400);
  draw_line_chart(image, {0, 0, 600, 400}, chart);
  EXPECT_THAT(image.svg(),
              AllOf(HasSubstr("points=\"231.00,215.58 400.00,89.17 \""), HasSubstr(">line<"),
                    Not(HasSubstr(">level<")), Not(HasSubstr("nan"))));
}

}  // namespace
}  // namespace winnow::picture
