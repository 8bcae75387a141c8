// A picture in memory: colours, rectangles and lines.
#pragma once

#include <cstdint>
#include <string>
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
inline constexpr Color kPale{226, 229, 233};  // grid lines, frames

// `share` of the way from one colour to the other.
Color mix(Color from, Color to, double share);

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
  Image(int width, int height, Color background = kWhite);

  int width() const { return width_; }
  int height() const { return height_; }
  Color at(int x, int y) const;
  // Red, green, blue per pixel, row by row.
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  // Each ignores what lies outside the picture.
  void blend(int x, int y, Color color, double coverage);
  void fill(Box box, Color color);                                 // smooth edges
  void frame(Box box, Color color);                                // one pixel wide, inside the box
  void line(Point from, Point to, double thickness, Color color);  // with round ends
  // Dashes of `dash` pixels with gaps of the same length.
  void dashed_line(Point from, Point to, double thickness, Color color, double dash);

 private:
  int width_;
  int height_;
  std::vector<std::uint8_t> bytes_;
};

// The picture as the bytes of a PNG file.
std::string encode_png(const Image& image);

}  // namespace winnow::picture
