// Quantisation and dequantisation of cached rows in double precision. It shares no code with any
// backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "winnow/cache/cache_format.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla::oracle {

// Byte `byte` of the row at (block, offset). In fp8_584 bytes 576 to 583 are the row's scales and
// the padding, which lie behind all rows of the block.
inline std::uint8_t& cache_byte(const TensorView& cache, CacheFormat format, std::int64_t block,
                                std::int64_t offset, std::int64_t byte) {
  const std::int64_t element = size_of(cache.dtype());
  auto* begin = static_cast<std::uint8_t*>(cache.data()) + block * cache.stride(0) * element;
  if (format != CacheFormat::fp8_584) return begin[offset * cache.stride(1) * element + byte];
  if (byte < 576) return begin[offset * 576 + byte];
  return begin[cache.size(1) * 576 + offset * 8 + (byte - 576)];
}

inline std::int64_t row_bytes(const ConstTensorView& cache) {
  return cache.size(3) * size_of(cache.dtype());
}

// The bytes of a row in the order of cache_byte().
inline std::vector<std::uint8_t> cache_row(const TensorView& cache, CacheFormat format,
                                           std::int64_t slot) {
  std::vector<std::uint8_t> bytes;
  for (std::int64_t byte = 0; byte < row_bytes(cache); ++byte) {
    bytes.push_back(cache_byte(cache, format, slot / cache.size(1), slot % cache.size(1), byte));
  }
  return bytes;
}

inline double f8_value(std::uint8_t bits) {
  const int exponent = bits / 8 % 16, mantissa = bits % 8;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits >= 128 ? -magnitude : magnitude;
}

// Rounds to the nearest bf16.
inline double to_bf16(double value) {
  if (!std::isfinite(value) || value == 0) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const double step = std::ldexp(1.0, std::max(exponent, -125) - 8);
  const double rounded = std::nearbyint(value / step) * step;
  return std::abs(rounded) < std::ldexp(1.0, 128) ? rounded : std::copysign(HUGE_VAL, rounded);
}

inline double bf16_at(const std::uint8_t* bytes) {
  return winnow::detail::bf16_to_f32(static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8));
}

inline double f32_at(const std::uint8_t* bytes) {
  float value = 0;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The columns that the bytes of a row, in the order of cache_byte(), encode.
inline std::vector<double> dequantised(const std::vector<std::uint8_t>& bytes, CacheFormat format) {
  std::vector<double> columns;
  std::size_t rope = 0;
  if (format == CacheFormat::fp8_656) {
    for (int c = 0; c < 512; ++c) {
      columns.push_back(to_bf16(f8_value(bytes[c]) * f32_at(&bytes[512 + c / 128 * 4])));
    }
    rope = 528;
  } else if (format == CacheFormat::fp8_584) {
    for (int c = 0; c < 448; ++c) {
      const std::uint8_t exponent = bytes[576 + c / 64];
      const double scale = exponent == 255 ? std::nan("") : std::ldexp(1.0, exponent - 127);
      columns.push_back(to_bf16(f8_value(bytes[c]) * scale));
    }
    rope = 448;
  } else if (format == CacheFormat::fp8_576) {
    for (const std::uint8_t byte : bytes) columns.push_back(f8_value(byte));
    rope = bytes.size();
  }
  const std::size_t end = format == CacheFormat::fp8_584 ? 576 : bytes.size();
  for (std::size_t byte = rope; byte < end; byte += 2) columns.push_back(bf16_at(&bytes[byte]));
  return columns;
}

// The nearest f8_e4m3; of two that are equally near, the one with even bits.
inline std::uint8_t to_f8(double value) {
  const double magnitude = std::abs(value);
  int best = 0;
  for (int bits = 1; bits <= 126; ++bits) {
    const auto distance = [&](int of) {
      return std::abs(f8_value(static_cast<std::uint8_t>(of)) - magnitude);
    };
    const double gain = distance(best) - distance(bits);
    if (gain > 0 || (gain == 0 && bits % 2 == 0)) best = bits;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

// The bytes of a row from those of its bf16 columns, in the order of cache_byte().
inline std::vector<std::uint8_t> quantised(const std::vector<std::uint8_t>& bf16,
                                           CacheFormat format) {
  if (format == CacheFormat::bf16) return bf16;
  const bool wide = format == CacheFormat::fp8_656;
  const int quantised = wide ? 512 : 448, group = wide ? 128 : 64;
  std::vector<std::uint8_t> elements, scales;
  for (int first = 0; first < quantised; first += group) {
    double amax = 0;
    bool finite = true;
    for (int c = first; c < first + group; ++c) {
      const double value = bf16_at(&bf16[2 * c]);
      finite = finite && std::isfinite(value);
      amax = std::max(amax, std::abs(value));
    }
    int exponent = -200;  // ceil(log2(max(amax, 1e-4) / 448)) by trial
    while (448 * std::ldexp(1.0, exponent) < std::max(amax, 1e-4)) ++exponent;
    for (int c = first; c < first + group; ++c) {
      elements.push_back(finite ? to_f8(bf16_at(&bf16[2 * c]) / std::ldexp(1.0, exponent)) : 0x7f);
    }
    if (!wide) {
      scales.push_back(static_cast<std::uint8_t>(finite ? exponent + 127 : 255));
      continue;
    }
    const std::uint32_t bits =
        finite ? static_cast<std::uint32_t>(exponent + 127) << 23 : 0x7fc00000u;
    for (int byte = 0; byte < 4; ++byte) {
      scales.push_back(static_cast<std::uint8_t>(bits >> (8 * byte)));
    }
  }
  std::vector<std::uint8_t> row = elements;
  const std::vector<std::uint8_t> rope(bf16.begin() + 2 * quantised, bf16.end());
  if (!wide) {
    scales.push_back(0);
    row.insert(row.end(), rope.begin(), rope.end());
  }
  row.insert(row.end(), scales.begin(), scales.end());
  if (wide) row.insert(row.end(), rope.begin(), rope.end());
  return row;
}

}  // namespace winnow::sparse_mla::oracle
