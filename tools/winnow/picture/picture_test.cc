#include <cmath>
#include <limits>
#include <memory>

#include <gtest/gtest.h>

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_PNG
#include "tools/winnow/picture/color_scale.h"
#include "tools/winnow/picture/heat_map.h"
#include "tools/winnow/picture/image.h"
#include "tools/winnow/picture/line_chart.h"
#include "tools/winnow/picture/text.h"
#include <stb/stb_image.h>

namespace winnow::picture {
namespace {

constexpr Color kRed{255, 0, 0};

int darkness(const Image& image) {
  int sum = 0;
  for (const std::uint8_t byte : image.bytes()) sum += 255 - byte;
  return sum;
}

TEST(Picture, PngReadsBackPixelForPixel) {
  Image image(31, 17);
  image.fill({3, 4, 10, 5}, kRed);
  image.line({0, 0}, {31, 17}, 2, kInk);
  const std::string png = encode_png(image);
  ASSERT_EQ(png.substr(0, 8), std::string("\x89PNG\r\n\x1a\n", 8));
  int width = 0, height = 0, channels = 0;
  const std::unique_ptr<stbi_uc, void (*)(void*)> pixels(
      stbi_load_from_memory(reinterpret_cast<const stbi_uc*>(png.data()),
                            static_cast<int>(png.size()), &width, &height, &channels, 0),
      stbi_image_free);
  ASSERT_NE(pixels, nullptr);
  EXPECT_EQ(width, 31);
  EXPECT_EQ(height, 17);
  ASSERT_EQ(channels, 3);
  EXPECT_EQ(std::vector<std::uint8_t>(pixels.get(), pixels.get() + 31 * 17 * 3), image.bytes());
}

TEST(Picture, FillCoversPartsOfPixelsAndIgnoresTheOutside) {
  Image image(10, 10);
  image.fill({2, 3, 4, 1.5}, kRed);
  EXPECT_EQ(image.at(2, 3), kRed);
  EXPECT_EQ(image.at(5, 3), kRed);
  EXPECT_EQ(image.at(3, 4), mix(kWhite, kRed, 0.5));
  EXPECT_EQ(image.at(6, 3), kWhite);
  EXPECT_EQ(image.at(1, 3), kWhite);
  image.fill({-5, -5, 100, 100}, kRed);
  EXPECT_EQ(image.at(0, 0), kRed);
  EXPECT_EQ(image.at(9, 9), kRed);
}

TEST(Picture, LinesLeaveOutWhatIsNotFinite) {
  Image image(10, 10);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  image.line({1, nan}, {9, 5}, 2, kRed);
  image.dashed_line({1, nan}, {9, 5}, 2, kRed, 3);
  EXPECT_EQ(darkness(image), 0);
  image.line({-1e3, 5}, {1e3, 5}, 2, kRed);
  EXPECT_EQ(image.at(5, 5), kRed);
}

TEST(Picture, TextHasWidthAndInkForEveryKindOfCharacter) {
  EXPECT_DOUBLE_EQ(text_width("", 20), 0);
  EXPECT_GT(text_width("mm", 20), text_width("ii", 20));
  for (const char* text : {"a", "\u00e9", "\u2423", "\u21b5", "\u6f22", "\U0001f33e", "\xff"}) {
    Image image(60, 60);
    draw_text(image, {30, 40}, text, 24, kInk, Align::center);
    EXPECT_GT(darkness(image), 500) << text;
    Image upwards(60, 60);
    draw_text_upwards(upwards, {40, 30}, text, 24, kInk, Align::center);
    EXPECT_GT(darkness(upwards), 500) << text;
  }
  Image image(20, 20);
  draw_text(image, {-500, 900}, "outside", 24, kInk);
  EXPECT_EQ(darkness(image), 0);
}

TEST(Picture, HeatColorsDarkenSteadily) {
  const auto light = [](Color c) { return 0.3 * c.red + 0.6 * c.green + 0.1 * c.blue; };
  for (int i = 0; i < 20; ++i) {
    EXPECT_GT(light(heat_color(i / 20.0)), light(heat_color((i + 1) / 20.0))) << i;
    EXPECT_GT(light(cold_color(i / 20.0)), light(cold_color((i + 1) / 20.0))) << i;
  }
  EXPECT_EQ(heat_color(-1), heat_color(0));
  EXPECT_EQ(heat_color(2), heat_color(1));
  EXPECT_EQ(heat_color(std::numeric_limits<double>::quiet_NaN()), heat_color(0));
}

TEST(Picture, HeatMapColorsItsCells) {
  HeatMap map;
  map.labels = {"a", "b", "c"};
  map.cell = 20;
  map.color = [](int row, int column) { return row == 2 && column == 0 ? kRed : kWhite; };
  const Box extent = heat_map_extent(map);
  Image image(int(extent.width) + 10, int(extent.height));
  draw_heat_map(image, {0, 0}, map);
  int red_pixels = 0;
  for (int y = 0; y < image.height(); ++y) {
    for (int x = 0; x < image.width(); ++x) red_pixels += image.at(x, y) == kRed ? 1 : 0;
  }
  EXPECT_NEAR(red_pixels, 20 * 20, 40);  // the frame covers an edge at most
}

TEST(Picture, TicksAreRound) {
  EXPECT_DOUBLE_EQ(tick_step(1.0, 5), 0.2);
  EXPECT_DOUBLE_EQ(tick_step(200, 6), 50);
  EXPECT_NEAR(tick_step(2.6, 5), 0.5, 1e-12);
}

TEST(Picture, ChartSurvivesNothingAndNan) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  LineChart chart;
  chart.title = "empty";
  Image image(600, 400);
  draw_line_chart(image, {0, 0, 600, 400}, chart);
  chart.lines.push_back({"line", kRed, 2, {{0, nan}, {1, 1}, {nan, 2}, {2, 3}}});
  chart.levels.push_back({"level", kInk, nan});
  draw_line_chart(image, {0, 0, 600, 400}, chart);
  EXPECT_GT(darkness(image), 0);
}

}  // namespace
}  // namespace winnow::picture
