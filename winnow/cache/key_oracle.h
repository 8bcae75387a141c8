// The bytes of a row of f8_e4m3 with its scale, in double precision. It shares no code with any
// backend.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "winnow/cache/cache_oracle.h"

namespace winnow::indexer::oracle {

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
    row.elements.push_back(sparse_mla::oracle::to_f8(static_cast<float>(value / double(scale))));
  }
  return row;
}

// Writes it to a slot of pages.
inline void write_key(const TensorView& pages, std::int64_t slot, const QuantizedRow& row) {
  const std::int64_t page = slot / 64, place = slot % 64;
  const auto d = static_cast<std::int64_t>(row.elements.size());
  for (std::int64_t c = 0; c < d; ++c) {
    pages.at<std::uint8_t>(page, place * d + c) = row.elements[static_cast<std::size_t>(c)];
  }
  const auto bits = std::bit_cast<std::uint32_t>(row.scale);
  for (int byte = 0; byte < 4; ++byte) {
    pages.at<std::uint8_t>(page, 64 * d + 4 * place + byte) =
        static_cast<std::uint8_t>(bits >> (8 * byte));
  }
}

}  // namespace winnow::indexer::oracle
