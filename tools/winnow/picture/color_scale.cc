#include "tools/winnow/picture/color_scale.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace winnow::picture {
namespace {

constexpr Color kHeat[] = {{252, 250, 238}, {254, 224, 144}, {250, 164, 84},
                           {226, 88, 61},   {158, 33, 84},   {62, 12, 74}};
constexpr Color kCold[] = {{246, 248, 250}, {198, 216, 232}, {125, 165, 204}, {49, 101, 161}};

Color along(std::span<const Color> colors, double value) {
  if (!(value > 0)) return colors.front();
  const double place = std::min(value, 1.0) * double(colors.size() - 1);
  const std::size_t index = std::min(std::size_t(place), colors.size() - 2);
  return mix(colors[index], colors[index + 1], place - double(index));
}

}  // namespace

Color heat_color(double value) { return along(kHeat, value); }
Color cold_color(double value) { return along(kCold, value); }

}  // namespace winnow::picture
