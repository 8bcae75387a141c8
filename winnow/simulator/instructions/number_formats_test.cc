// Conversions against a search of the nearest number, and the approximations against their bounds.
#include "winnow/simulator/instructions/number_formats.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace winnow::simulator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::bit_cast<float>(0xffc01234u);

// All values of an 8-bit format by its definition: bias, bits of the mantissa.
double f8_value(int bits, int mantissa_bits, int bias) {
  const int exponent = (bits & 0x7f) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return bits & 0x80 ? -magnitude : magnitude;
}

TEST(NumberFormats, EveryF8HasItsValue) {
  for (int bits = 0; bits < 256; ++bits) {
    const float e4m3 = winnow::detail::f8_e4m3_to_f32(static_cast<std::uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(e4m3));
    } else {
      EXPECT_EQ(e4m3, f8_value(bits, 3, 7));
    }
    const float e5m2 = f8_e5m2_to_f32(static_cast<std::uint8_t>(bits));
    if ((bits & 0x7f) > 0x7c) {
      EXPECT_TRUE(std::isnan(e5m2));
    } else if ((bits & 0x7f) == 0x7c) {
      EXPECT_EQ(e5m2, bits & 0x80 ? -kInfinity : kInfinity);
    } else {
      EXPECT_EQ(e5m2, f8_value(bits, 2, 15));
    }
  }
}

TEST(NumberFormats, Tf32HasTenBitsOfMantissa) {
  EXPECT_EQ(tf32_to_f32(0x3f803fffu), 1.0f + 0x1p-10f);
  EXPECT_EQ(tf32_to_f32(0x3f801fffu), 1.0f);
}

TEST(NumberFormats, E4m3IsTheNearestAndSaturates) {
  std::vector<float> inputs = {448.0f, 464.0f, 465.0f, 1e30f, kInfinity, 0x1p-10f, 0x1.8p-9f, 0.0f};
  for (int bits = 0; bits < 0x7f; ++bits) {  // all numbers, and the middles between them
    const auto value = static_cast<float>(f8_value(bits, 3, 7));
    const auto next = static_cast<float>(f8_value(std::min(bits + 1, 0x7e), 3, 7));
    inputs.insert(inputs.end(),
                  {value, (value + next) / 2, std::nextafter((value + next) / 2, 0.0f),
                   std::nextafter((value + next) / 2, kInfinity)});
  }
  for (const float x : inputs) {
    int best = 0;
    for (int bits = 0; bits < 0x7f; ++bits) {
      const double distance = std::fabs(f8_value(bits, 3, 7) - std::fmin(x, 448.0f));
      const double least = std::fabs(f8_value(best, 3, 7) - std::fmin(x, 448.0f));
      if (distance < least || (distance == least && bits % 2 == 0)) best = bits;
    }
    EXPECT_EQ(cvt_rn_satfinite_e4m3(x), best) << x;
    EXPECT_EQ(cvt_rn_satfinite_e4m3(-x), best | 0x80) << -x;
  }
  EXPECT_EQ(cvt_rn_satfinite_e4m3(kNan), 0x7f);
}

TEST(NumberFormats, Bf16IsTheNearest) {
  for (std::uint32_t upper = 0; upper < 0x7f80; upper += 61) {
    for (const std::uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(upper << 16 | lower);
      const bool up = lower > 0x8000 || (lower == 0x8000 && upper % 2 != 0);
      EXPECT_EQ(cvt_rn_bf16(x), upper + (up ? 1 : 0));
      EXPECT_EQ(cvt_rn_bf16(-x), (upper + (up ? 1 : 0)) | 0x8000);
    }
  }
  EXPECT_EQ(cvt_rn_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(cvt_rn_bf16(kNan), 0x7fff);
  EXPECT_EQ(cvt_rn_bf16x2(1.0f, -2.0f), 0x3f80c000u);
}

TEST(NumberFormats, F16IsTheNearest) {
  EXPECT_EQ(cvt_rn_f16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(cvt_rn_f16(1.0f + 0x1.8p-10f), 0x3c02);
  EXPECT_EQ(cvt_rn_f16(65520.0f), 0x7c00);
  EXPECT_EQ(cvt_rn_f16(0x1p-24f), 1);
  EXPECT_EQ(cvt_rn_f16(kNan), 0x7fff);
}

TEST(NumberFormats, PowersOfTwoKeepTheirBound) {
  for (float x = -130.0f; x < 128.0f; x += 0.0371f) {
    const double exact = std::exp2(static_cast<double>(x));
    const float y = ex2_approx_ftz(x);
    if (x < -126.0f) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(y), 0u) << x;
    } else {
      EXPECT_LE(std::fabs(y - exact), exact * 0x1p-22) << x;
    }
  }
  EXPECT_EQ(ex2_approx_ftz(-kInfinity), 0.0f);
  EXPECT_EQ(ex2_approx_ftz(kInfinity), kInfinity);
  EXPECT_EQ(ex2_approx_ftz(128.0f), kInfinity);
  EXPECT_EQ(ex2_approx_ftz(0x1p-140f), 1.0f);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(ex2_approx_ftz(kNan)), kCanonicalNan);
}

TEST(NumberFormats, MaximaKeepNanAndSigns) {
  EXPECT_EQ(max_nan(1.0f, 2.0f), 2.0f);
  EXPECT_FALSE(std::signbit(max_nan(-0.0f, 0.0f)));
  EXPECT_FALSE(std::signbit(max_nan(0.0f, -0.0f)));
  EXPECT_TRUE(std::isnan(max_nan(kNan, 1.0f)));
  EXPECT_TRUE(std::isnan(max_nan(1.0f, kNan)));
}

}  // namespace
}  // namespace winnow::simulator
