// A group of f32 numbers as f8_e4m3 with one scale. Internal; compiled once per instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "winnow/core/dtype.h"
#include "winnow/core/f8_scale.h"

namespace winnow {

// Writes f8_e4m3(x / scale) of `count` numbers to `to` and returns the scale: that of f8_scale.h
// or, with `power_of_two`, the smallest power of two not below it. If any number is NaN or
// infinite, every element and the scale are NaN.
inline float quantize_f8(const float* x, std::int64_t count, bool power_of_two, std::uint8_t* to) {
  constexpr std::uint32_t kInfinityBits = 0x7f800000u, kMantissa = 0x007fffffu;
  // Magnitudes order as their bits do, NaN above infinity above the rest.
  std::uint32_t amax = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    amax = std::max(amax, std::bit_cast<std::uint32_t>(x[c]) & 0x7fffffffu);
  }
  if (amax >= kInfinityBits) {
    std::memset(to, 0x7f, static_cast<std::size_t>(count));
    return std::numeric_limits<float>::quiet_NaN();
  }
  float scale = std::max(std::bit_cast<float>(amax), kLeastAmax) / kLargestF8;
  if (power_of_two) {  // up to the next exponent, unless it is one already
    scale = std::bit_cast<float>((std::bit_cast<std::uint32_t>(scale) + kMantissa) & ~kMantissa);
  }
  for (std::int64_t c = 0; c < count; ++c) to[c] = Float8E4M3(x[c] / scale).bits;
  return scale;
}

}  // namespace winnow
