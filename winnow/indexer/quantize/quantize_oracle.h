// The formula of indexer::quantize: the nearest of all numbers that f8_e4m3 has. It shares no code
// with any backend.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "winnow/indexer/quantize/quantize.h"
#include "winnow/testing/compare.h"

namespace winnow::indexer::oracle {

// The number that has these bits, 0 to 126: all finite ones but the negative, in ascending order.
inline double f8_value(int bits) {
  const int exponent = bits / 8, mantissa = bits % 8;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// The nearest f8_e4m3; of two that are equally near, the one with even bits.
inline std::uint8_t to_f8(double value) {
  const double magnitude = std::abs(value);
  int best = 0;
  for (int bits = 1; bits <= 126; ++bits) {
    const double gain = std::abs(f8_value(best) - magnitude) - std::abs(f8_value(bits) - magnitude);
    if (gain > 0 || (gain == 0 && bits % 2 == 0)) best = bits;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

struct QuantizedRow {
  std::vector<std::uint8_t> elements;
  float scale;
};

inline QuantizedRow quantize_row(const std::vector<double>& x, bool power_of_two) {
  double amax = 0;
  bool finite = true;
  for (const double value : x) {
    finite = finite && std::isfinite(value);
    amax = std::max(amax, std::abs(value));
  }
  if (!finite) {
    return {std::vector<std::uint8_t>(x.size(), 0x7f), std::bit_cast<float>(0x7fc00000u)};
  }
  // Dividing floats in double and rounding the quotient to float gives what dividing in float
  // gives.
  auto scale = static_cast<float>(std::max(amax, double(1e-4f)) / 448);
  if (power_of_two) {
    int exponent = 0;
    const double fraction = std::frexp(double(scale), &exponent);  // in [0.5, 1)
    scale = static_cast<float>(std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent));
  }
  QuantizedRow row{{}, scale};
  for (const double value : x) {
    row.elements.push_back(to_f8(static_cast<float>(value / double(scale))));
  }
  return row;
}

inline void quantize(const QuantizeArgs& args) {
  const std::int64_t d = args.x.size(args.x.rank() - 1);
  for (std::int64_t i = 0; i < args.x.size(0); ++i) {
    for (std::int64_t h = 0; h < (args.x.rank() == 3 ? args.x.size(1) : 1); ++h) {
      const ConstTensorView of_query = args.x.slice(0, i, i + 1);
      const QuantizedRow row =
          quantize_row(testing::read(args.x.rank() == 3 ? of_query.slice(1, h, h + 1) : of_query),
                       args.power_of_two);
      if (args.slots.present()) {
        const std::int64_t slot = args.slots.dtype() == DType::i64 ? args.slots.at<std::int64_t>(i)
                                                                   : args.slots.at<std::int32_t>(i);
        if (slot < 0) continue;
        const std::int64_t page = slot / 64, place = slot % 64;
        for (std::int64_t c = 0; c < d; ++c) {
          args.pages.at<std::uint8_t>(page, place * d + c) = row.elements[c];
        }
        const auto bits = std::bit_cast<std::uint32_t>(row.scale);
        for (int byte = 0; byte < 4; ++byte) {
          args.pages.at<std::uint8_t>(page, 64 * d + 4 * place + byte) =
              static_cast<std::uint8_t>(bits >> (8 * byte));
        }
        continue;
      }
      for (std::int64_t c = 0; c < d; ++c) {
        if (args.x.rank() == 3) {
          args.rows.at<Float8E4M3>(i, h, c).bits = row.elements[c];
        } else {
          args.rows.at<Float8E4M3>(i, c).bits = row.elements[c];
        }
      }
      (args.x.rank() == 3 ? args.scale.at<float>(i, h) : args.scale.at<float>(i)) = row.scale;
    }
  }
}

}  // namespace winnow::indexer::oracle
