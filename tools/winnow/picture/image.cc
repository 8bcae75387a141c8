#include "tools/winnow/picture/image.h"

#include <algorithm>
#include <cmath>

namespace winnow::picture {
namespace {

// How much of [pixel, pixel + 1] lies in [begin, end].
double overlap(int pixel, double begin, double end) {
  return std::clamp(std::min(end, pixel + 1.0) - std::max(begin, double(pixel)), 0.0, 1.0);
}

std::uint8_t mix_channel(std::uint8_t from, std::uint8_t to, double share) {
  return static_cast<std::uint8_t>(std::lround(from + (double(to) - double(from)) * share));
}

// In pixels. (std::hypot would tie the program to the newest C library.)
double length_of(double dx, double dy) { return std::sqrt(dx * dx + dy * dy); }

}  // namespace

Color mix(Color from, Color to, double share) {
  share = std::clamp(share, 0.0, 1.0);
  return {mix_channel(from.red, to.red, share), mix_channel(from.green, to.green, share),
          mix_channel(from.blue, to.blue, share)};
}

Image::Image(int width, int height, Color background) : width_(width), height_(height) {
  bytes_.reserve(3 * static_cast<std::size_t>(width) * static_cast<std::size_t>(height));
  for (std::int64_t i = 0; i < std::int64_t{width} * height; ++i) {
    bytes_.insert(bytes_.end(), {background.red, background.green, background.blue});
  }
}

Color Image::at(int x, int y) const {
  const std::uint8_t* pixel = bytes_.data() + 3 * (std::size_t(y) * std::size_t(width_) + x);
  return {pixel[0], pixel[1], pixel[2]};
}

void Image::blend(int x, int y, Color color, double coverage) {
  if (x < 0 || y < 0 || x >= width_ || y >= height_ || !(coverage > 0)) return;
  const Color mixed = mix(at(x, y), color, coverage);
  std::uint8_t* pixel = bytes_.data() + 3 * (std::size_t(y) * std::size_t(width_) + x);
  pixel[0] = mixed.red;
  pixel[1] = mixed.green;
  pixel[2] = mixed.blue;
}

void Image::fill(Box box, Color color) {
  const int x_begin = std::max(0, int(std::floor(box.x)));
  const int y_begin = std::max(0, int(std::floor(box.y)));
  const int x_end = std::min(width_, int(std::ceil(box.x + box.width)));
  const int y_end = std::min(height_, int(std::ceil(box.y + box.height)));
  for (int y = y_begin; y < y_end; ++y) {
    const double down = overlap(y, box.y, box.y + box.height);
    for (int x = x_begin; x < x_end; ++x) {
      blend(x, y, color, down * overlap(x, box.x, box.x + box.width));
    }
  }
}

void Image::frame(Box box, Color color) {
  fill({box.x, box.y, box.width, 1}, color);
  fill({box.x, box.y + box.height - 1, box.width, 1}, color);
  fill({box.x, box.y, 1, box.height}, color);
  fill({box.x + box.width - 1, box.y, 1, box.height}, color);
}

void Image::line(Point from, Point to, double thickness, Color color) {
  const double dx = to.x - from.x, dy = to.y - from.y;
  if (!std::isfinite(dx) || !std::isfinite(dy)) return;
  const double length_squared = dx * dx + dy * dy;
  const double reach = thickness / 2 + 1;
  const int x_begin = std::max(0, int(std::floor(std::min(from.x, to.x) - reach)));
  const int y_begin = std::max(0, int(std::floor(std::min(from.y, to.y) - reach)));
  const int x_end = std::min(width_, int(std::ceil(std::max(from.x, to.x) + reach)));
  const int y_end = std::min(height_, int(std::ceil(std::max(from.y, to.y) + reach)));
  for (int y = y_begin; y < y_end; ++y) {
    for (int x = x_begin; x < x_end; ++x) {
      const double px = x + 0.5 - from.x, py = y + 0.5 - from.y;
      const double along =
          length_squared > 0 ? std::clamp((px * dx + py * dy) / length_squared, 0.0, 1.0) : 0.0;
      const double distance = length_of(px - along * dx, py - along * dy);
      blend(x, y, color, std::clamp(thickness / 2 + 0.5 - distance, 0.0, 1.0));
    }
  }
}

void Image::dashed_line(Point from, Point to, double thickness, Color color, double dash) {
  const double length = length_of(to.x - from.x, to.y - from.y);
  if (!std::isfinite(length) || !(length > 0)) return;
  const auto point_at = [&](double distance) {
    const double share = std::min(1.0, distance / length);
    return Point{from.x + (to.x - from.x) * share, from.y + (to.y - from.y) * share};
  };
  for (double begin = 0; begin < length; begin += 2 * dash) {
    line(point_at(begin), point_at(begin + dash), thickness, color);
  }
}

}  // namespace winnow::picture
