// Conversions of f16, bf16 and f8_e4m3, for every bit pattern, compared with values computed from
// exponent and mantissa.
#include "winnow/core/dtype.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/testing/generate.h"

namespace winnow {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A binary float format. `fn` formats have no infinity, and their only NaN has all exponent and
// mantissa bits set.
struct Format {
  int exponent_bits, mantissa_bits;
  bool fn = false;
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr Format kF16{5, 10}, kBf16{8, 7}, kE4M3{4, 3, true};

double decode(const Format& format, std::uint32_t pattern) {
  const std::uint32_t mantissa = pattern & ((1u << format.mantissa_bits) - 1);
  const int exponent = int(pattern >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const double sign = (pattern >> (format.bits() - 1)) != 0 ? -1 : 1;
  const bool top = exponent == (1 << format.exponent_bits) - 1;
  const bool all_ones = mantissa == (1u << format.mantissa_bits) - 1;
  if (top && (format.fn ? all_ones : mantissa != 0)) return std::nan("");
  if (top && !format.fn) return sign * std::numeric_limits<double>::infinity();
  const double fraction = std::ldexp(double(mantissa), -format.mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias());
  return sign * std::ldexp(1 + fraction, exponent - format.bias());
}

template <class T>
T from_bits(std::uint32_t pattern) {
  T value;
  value.bits = static_cast<decltype(value.bits)>(pattern);
  return value;
}

template <class T>
void expect_decodes_all(const Format& format) {
  for (std::uint32_t pattern = 0; pattern < (1u << format.bits()); ++pattern) {
    const double expected = decode(format, pattern);
    const double actual = float(from_bits<T>(pattern));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << pattern;
    } else {
      EXPECT_EQ(actual, expected) << pattern;
    }
    EXPECT_EQ(std::signbit(actual), (pattern >> (format.bits() - 1)) != 0) << pattern;
    // Every value of the format converts back to its own pattern.
    const T again{float(from_bits<T>(pattern))};
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(float(again))) << pattern;
    } else {
      EXPECT_EQ(again.bits, pattern);
    }
  }
}

TEST(DType, EveryPatternOfF16) { expect_decodes_all<Half>(kF16); }
TEST(DType, EveryPatternOfBf16) { expect_decodes_all<BFloat16>(kBf16); }
TEST(DType, EveryPatternOfE4M3) { expect_decodes_all<Float8E4M3>(kE4M3); }

// The middle of two neighbours rounds to the even one, the next f32 on either side to that side.
template <class T>
void expect_rounds_between_neighbours(const Format& format, std::uint32_t last_finite) {
  for (std::uint32_t pattern = 0; pattern < last_finite; ++pattern) {
    const double low = decode(format, pattern), high = decode(format, pattern + 1);
    const float middle = float((low + high) / 2);
    if (double(middle) != (low + high) / 2) continue;  // bf16 subnormals: f32 has no middle
    const std::uint32_t even = pattern % 2 == 0 ? pattern : pattern + 1;
    const std::uint32_t sign = 1u << (format.bits() - 1);
    EXPECT_EQ(T(middle).bits, even) << pattern;
    EXPECT_EQ(T(-middle).bits, even | sign) << pattern;
    EXPECT_EQ(T(std::nextafter(middle, 0.0f)).bits, pattern);
    EXPECT_EQ(T(std::nextafter(middle, kInf)).bits, pattern + 1);
  }
}

TEST(DType, F16RoundsToNearestEven) { expect_rounds_between_neighbours<Half>(kF16, 0x7bff); }
TEST(DType, Bf16RoundsToNearestEven) { expect_rounds_between_neighbours<BFloat16>(kBf16, 0x7f7f); }
TEST(DType, E4M3RoundsToNearestEven) { expect_rounds_between_neighbours<Float8E4M3>(kE4M3, 0x7e); }

TEST(DType, Overflow) {
  EXPECT_EQ(Half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(Half(65519.996f).bits, 0x7bff);
  EXPECT_EQ(Half(65520.0f).bits, 0x7c00);  // halfway to 2^16: the even neighbour is infinity
  EXPECT_EQ(Half(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(Half(-kInf).bits, 0xfc00);

  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::max()).bits, 0xff80);
  EXPECT_EQ(BFloat16(kInf).bits, 0x7f80);

  for (const float value : {448.0f, 460.0f, 464.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(Float8E4M3(value).bits, 0x7e) << value;
    EXPECT_EQ(Float8E4M3(-value).bits, 0xfe) << value;
  }
}

TEST(DType, NanStaysNan) {
  for (const std::uint32_t bits :
       {0x7fc00000u, 0x7f800001u, 0xff800001u, 0xffffffffu, 0x7fbfffffu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(float(Half(nan)))) << bits;
    EXPECT_TRUE(std::isnan(float(BFloat16(nan)))) << bits;
    EXPECT_TRUE(std::isnan(float(Float8E4M3(nan)))) << bits;
  }
}

TEST(DType, Underflow) {
  EXPECT_EQ(Half(0x1p-25f).bits, 0);  // half of the smallest subnormal: the even neighbour is 0
  EXPECT_EQ(Half(std::nextafter(0x1p-25f, 1.0f)).bits, 1);
  EXPECT_EQ(Half(-0x1p-30f).bits, 0x8000);
  EXPECT_EQ(Float8E4M3(0x1p-10f).bits, 0);
  EXPECT_EQ(Float8E4M3(std::nextafter(0x1p-10f, 1.0f)).bits, 1);
  EXPECT_EQ(Half(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(Float8E4M3(std::numeric_limits<float>::denorm_min()).bits, 0);
}

// Random floats of all magnitudes: neither neighbour of the result is nearer.
TEST(DType, RandomFloatsGoToTheNearest) {
  testing::Random random(11);
  for (int n = 0; n < 200000; ++n) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random.next()));
    if (!std::isfinite(value)) continue;
    const auto check = [value](const Format& format, std::uint32_t bits, double largest) {
      const std::uint32_t magnitude = bits & ((1u << (format.bits() - 1)) - 1);
      const double size = std::abs(double(value)), got = decode(format, magnitude);
      if (size > largest) return;  // see Overflow
      const double error = std::abs(got - size);
      EXPECT_LE(error, std::abs(decode(format, magnitude + 1) - size)) << value;
      if (magnitude > 0) {
        EXPECT_LE(error, std::abs(decode(format, magnitude - 1) - size)) << value;
      }
    };
    check(kF16, Half(value).bits, decode(kF16, 0x7bfe));
    check(kBf16, BFloat16(value).bits, decode(kBf16, 0x7f7e));
    check(kE4M3, Float8E4M3(value).bits, decode(kE4M3, 0x7d));
  }
}

TEST(DType, ConversionsWorkAtCompileTime) {
  static_assert(float(Half(1.5f)) == 1.5f);
  static_assert(float(BFloat16(-2.0f)) == -2.0f);
  static_assert(float(Float8E4M3(448.0f)) == 448.0f);
}

TEST(DType, NamesAndSizes) {
  struct Row {
    DType dtype;
    const char* name;
    std::int64_t size;
  };
  for (const Row& row :
       {Row{DType::f32, "f32", 4}, Row{DType::f16, "f16", 2}, Row{DType::bf16, "bf16", 2},
        Row{DType::f8_e4m3, "f8_e4m3", 1}, Row{DType::u8, "u8", 1}, Row{DType::i32, "i32", 4},
        Row{DType::i64, "i64", 8}, Row{DType::f64, "f64", 8}}) {
    EXPECT_EQ(to_string(row.dtype), row.name);
    EXPECT_EQ(size_of(row.dtype), row.size) << row.name;
  }
  EXPECT_EQ(dtype_of<float>, DType::f32);
  EXPECT_EQ(dtype_of<double>, DType::f64);
  EXPECT_EQ(dtype_of<BFloat16>, DType::bf16);
  EXPECT_EQ(sizeof(Half), 2u);
  EXPECT_EQ(sizeof(Float8E4M3), 1u);
}

TEST(DType, SumsAreInF32OrInF64) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3}) {
    EXPECT_EQ(accumulator_of(dtype), DType::f32);
    EXPECT_EQ(round_to_accumulator(dtype, 0.1), double{0.1f});
    EXPECT_TRUE(std::isinf(round_to_accumulator(dtype, 1e300)));
  }
  EXPECT_EQ(accumulator_of(DType::f64), DType::f64);
  EXPECT_EQ(round_to_accumulator(DType::f64, 0.1), 0.1);
}

}  // namespace
}  // namespace winnow
