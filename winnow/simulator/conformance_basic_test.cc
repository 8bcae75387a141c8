// Conformance of arithmetic, memory, exchanges in a warp, and barriers.
#include <bit>
#include <cmath>
#include <limits>

#include "winnow/core/dtype.h"
#include "winnow/simulator/conformance_test.h"

namespace winnow::conformance {
namespace {

constexpr std::size_t kThreads = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 128 numbers, the odd ones first.
Words numbers(float from, float step, std::vector<float> odd) {
  Words words;
  for (const float x : odd) words.push_back(bits(x));
  while (words.size() < kThreads) {
    words.push_back(bits(from));
    from += step;
  }
  return words;
}

std::uint32_t packed(float low, float high) {
  const auto one = [](float x) -> std::uint32_t {
    return std::isnan(x) ? 0x7fff : BFloat16(x).bits;
  };
  return one(low) | one(high) << 16;
}

float bf16(std::uint32_t word, bool upper) {
  return number(upper ? word & 0xffff0000u : word << 16);
}

TEST_F(Conformance, Arithmetic) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Words x =
      numbers(-140.0f, 2.3f, {0.0f, -0.0f, kInfinity, -kInfinity, nan, 1.0f, nan, -1e30f});
  const Words y = numbers(3.7f, -1.1f, {1.0f, 0.0f, 2.0f, -kInfinity, 1.0f, nan, nan, 1e30f});
  Words in = x;
  in.insert(in.end(), y.begin(), y.end());
  for (const std::uint32_t word : random_words(8 * kThreads, 1)) {
    // bf16 of magnitudes from 2^-8 to 2^8.
    const auto tame = [](std::uint32_t half) {
      return (half & 0x807fu) | (119u + half / 128 % 16) << 7;
    };
    in.push_back(tame(word & 0xffffu) | tame(word >> 16) << 16);
  }
  for (const std::uint32_t word : random_words(2 * kThreads, 2)) {
    in.push_back(in.size() % 3 == 0 ? word : word % 1000 + 1);
  }
  const Words out = run(launch_math, in, 12 * kThreads);
  for (std::size_t t = 0; t < kThreads; ++t) {
    SCOPED_TRACE(t);
    const float a = number(in[t]), b = number(in[kThreads + t]);
    const std::uint32_t* const got = out.data() + 12 * t;
    const double power = std::exp2(static_cast<double>(a));
    if (std::isnan(a)) {
      EXPECT_TRUE(std::isnan(number(got[0])));
      EXPECT_EQ(got[1], 0x7fffffffu);
    } else {
      if (power < 0x1p-126 || std::isinf(static_cast<float>(power))) {
        EXPECT_EQ(got[0], power < 1 ? 0u : bits(kInfinity));
      } else {
        EXPECT_NEAR(number(got[0]), power, power * 0x1p-21);
      }
      EXPECT_EQ(got[1], a > 0 ? bits(a) : 0u);
    }
    EXPECT_EQ(got[2], packed(a, b));
    float dot = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const std::size_t at = 2 * kThreads + 4 * t + i / 2;
      dot = std::fma(bf16(in[at], i % 2), bf16(in[at + 4 * kThreads], i % 2), dot);
    }
    EXPECT_EQ(got[3], bits(dot));
    if (std::isnan(a) || std::isnan(b)) {
      EXPECT_TRUE(std::isnan(number(got[4])));
    } else if (std::isinf(std::fmax(a, b))) {
      EXPECT_EQ(number(got[4]), std::fmax(a, b));
    } else {
      const double larger = std::fmax(a, b), smaller = std::fmin(a, b);
      const double sum = larger + std::log2(1 + std::exp2(smaller - larger));
      EXPECT_NEAR(number(got[4]), sum, 1e-6 * std::fmax(1.0, std::fabs(sum)));
    }
    const std::uint32_t n = in[10 * kThreads + t], divisor = in[11 * kThreads + t];
    EXPECT_EQ(got[5], (n + divisor - 1) / divisor);  // modulo 2^32
    EXPECT_EQ(got[6], n / divisor);
    EXPECT_EQ(got[7], n % divisor);
    EXPECT_EQ(got[8], bits(kInfinity));
    EXPECT_EQ(got[9], bits(-kInfinity));
    EXPECT_EQ(got[10], (in[t] | in[kThreads + t] | n) >> 31);
    const std::uint32_t first = in[2 * kThreads + 4 * t], second = in[6 * kThreads + 4 * t];
    EXPECT_EQ(got[11], (first >> 31 ? 0xffu : 0u) | (second >> 31 ? 0xff00u : 0u) |
                           (second & 0xffu) << 16 | (first & 0x80u ? 0xff000000u : 0u));
  }
}

// What prmt makes of a word: digit i of the selector names byte i of the result.
std::uint32_t permuted(std::uint32_t word, std::uint32_t selector) {
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t digit = selector >> 4 * i & 15;
    std::uint32_t byte = (digit & 7) < 4 ? word >> 8 * (digit & 3) & 255 : 0;
    if (digit >= 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

TEST_F(Conformance, NarrowFormats) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Ties, the least numbers of f8_e4m3, what lies between 448 and infinity, and powers of two.
  Words in = numbers(-500.0f, 7.9f,
                     {0.0f, -0.0f, kInfinity, -kInfinity, nan, 448.0f, 449.0f, -464.0f, 1e30f,
                      17.0f, 19.0f, -21.0f, 0x1p-9f, 0x1p-10f, 0x1.8p-9f, -0x1.1p-10f});
  for (int i = 0; i < 3 * static_cast<int>(kThreads); ++i) {
    in.push_back(bits(std::ldexp(1.0f + static_cast<float>(i % 32) / 32, i / 16 - 13)));
  }
  for (std::uint32_t t = 0; t < kThreads; ++t) {  // every f8_e4m3, in every byte
    in.push_back((2 * t | (2 * t + 1) << 8 | (255 - 2 * t) << 16 | (254 - 2 * t) << 24));
  }
  for (const std::uint32_t word : random_words(2 * kThreads, 9)) {
    const auto tame = [](std::uint32_t half) {
      return (half & 0x807fu) | (100u + half / 128 % 64) << 7;
    };
    in.push_back(tame(word & 0xffffu) | tame(word >> 16) << 16);
  }
  const Words odd = {0x7f803f80u, 0xff800000u, 0x7fff8000u, 0x80000000u};  // inf, 1, -inf, 0, ...
  for (std::size_t i = 0; i < 16; ++i) {
    in[5 * kThreads + i] = odd[i % 4];
    in[6 * kThreads + i] = odd[i / 4];
  }
  const Words out = run(launch_narrow, in, 15 * kThreads);
  for (std::size_t t = 0; t < kThreads; ++t) {
    SCOPED_TRACE(t);
    const std::uint32_t* const got = out.data() + 15 * t;
    std::uint32_t f8 = 0;
    const std::uint32_t word = in[4 * kThreads + t];
    for (std::size_t i = 0; i < 4; ++i) {
      const float x = number(in[4 * t + i]);
      f8 |= (std::isnan(x) ? 0x7fu : Float8E4M3(x).bits) << 8 * i;
      Float8E4M3 narrow;
      narrow.bits = static_cast<std::uint8_t>(word >> 8 * i);
      const auto wide = static_cast<float>(narrow);
      if (std::isnan(wide)) {
        EXPECT_TRUE(std::isnan(number(got[1 + i])));
      } else {
        EXPECT_EQ(got[1 + i], bits(wide));
      }
      Half widened;
      widened.bits = static_cast<std::uint16_t>(got[12 + i / 2] >> 16 * (i % 2));
      if (std::isnan(wide)) {
        EXPECT_TRUE(std::isnan(static_cast<float>(widened)));
      } else {
        EXPECT_EQ(widened.bits, Half(wide).bits);
      }
    }
    EXPECT_EQ(got[0], f8);
    const std::uint32_t a = in[5 * kThreads + t], b = in[6 * kThreads + t];
    EXPECT_EQ(got[5], packed(bf16(a, false) * bf16(b, false), bf16(a, true) * bf16(b, true)));
    EXPECT_EQ(got[6], permuted(word, 0x4140));
    EXPECT_EQ(got[7], permuted(word, 0x0123));
    EXPECT_EQ(got[8], permuted(word, 0xb38a));
    for (std::size_t i = 0; i < 2; ++i) {
      const float x = number(in[4 * t + i]);
      const std::uint32_t half = got[9] >> 16 * i & 0xffffu;
      if (std::isnan(x)) {
        EXPECT_GT(half & 0x7fffu, 0x7c00u);
      } else {
        EXPECT_EQ(half, Half(x).bits);
      }
      Half narrow;
      narrow.bits = static_cast<std::uint16_t>(word >> 16 * i);
      const auto wide = static_cast<float>(narrow);
      if (std::isnan(wide)) {
        EXPECT_TRUE(std::isnan(number(got[10 + i])));
      } else {
        EXPECT_EQ(got[10 + i], bits(wide));
      }
      const auto finite = [i](std::uint32_t from) {
        Half number_of;
        number_of.bits = static_cast<std::uint16_t>(from >> 16 * i & 0x7bffu);
        return static_cast<float>(number_of);
      };
      EXPECT_EQ(got[14] >> 16 * i & 0xffffu, Half(finite(word) * finite(a)).bits);
    }
  }
}

TEST_F(Conformance, GlobalMemory) {
  const Words in = random_words(4 * kThreads, 3);
  const Words out = run(launch_memory, in, 24 * kThreads + 7);
  for (std::size_t t = 0; t < kThreads; ++t) {
    SCOPED_TRACE(t);
    const std::uint32_t *const got = out.data() + 20 * t, *const gave = in.data() + 4 * t;
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(got[i], gave[i]);
      EXPECT_EQ(got[4 + i], gave[i]);
      EXPECT_EQ(got[8 + i], gave[i]);
      EXPECT_EQ(got[16 + i], gave[i]);
      EXPECT_EQ(out[20 * kThreads + 4 * t + i], gave[3 - i]);
    }
    EXPECT_EQ(got[12], gave[2]);
  }
  const std::uint32_t* const words = out.data() + 24 * kThreads;
  EXPECT_EQ(words[0], in[0]);
  EXPECT_EQ(words[1], in[1]);
  const std::uint64_t next = (std::uint64_t{in[1]} << 32 | in[0]) + 1;
  EXPECT_EQ(words[2], static_cast<std::uint32_t>(next));
  EXPECT_EQ(words[3], static_cast<std::uint32_t>(next >> 32));
  EXPECT_EQ(words[4], 1u);
  EXPECT_EQ(words[5], in[2]);
  EXPECT_EQ(words[6], in[2]);
}

TEST_F(Conformance, BlocksHandWordsOver) {
  const Words in = random_words(kThreads, 8);
  const Words out = run(launch_handover, in, kThreads + 10);
  for (std::size_t t = 0; t < kThreads; ++t) EXPECT_EQ(out[t], in[t] + 5) << t;
}

TEST_F(Conformance, Reductions) {
  Words in;
  for (std::size_t i = 0; i < 4 * kThreads; ++i) in.push_back(bits(static_cast<float>(i % 17) - 5));
  float sums[4] = {};
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < in.size(); ++i) sums[i % 4] += number(in[i]);
  for (std::size_t t = 0; t < kThreads; ++t) total += (std::uint64_t{t} << 30) + in[4 * t];
  const Words out = run(launch_reductions, in, 16);
  EXPECT_EQ(out[0], 3 * kThreads);
  EXPECT_EQ(number(out[1]), sums[0]);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(number(out[4 + i]), sums[i]);
    EXPECT_EQ(number(out[8 + i]), sums[i]);
  }
  for (std::size_t i = 12; i < 16; i += 2) {
    EXPECT_EQ(out[i], static_cast<std::uint32_t>(total));
    EXPECT_EQ(out[i + 1], static_cast<std::uint32_t>(total >> 32));
  }
}

TEST_F(Conformance, SharedMemory) {
  const Words in = random_words(kThreads, 4);
  const Words out = run(launch_shared, in, 16 * kThreads + 2);
  for (std::size_t t = 0; t < kThreads; ++t) {
    SCOPED_TRACE(t);
    const std::uint32_t x = in[t ^ 1], *const got = out.data() + 16 * t;
    const std::uint64_t square = std::uint64_t{x} * x;
    EXPECT_EQ(got[0], x);
    EXPECT_EQ(got[1], x + 1);
    EXPECT_EQ(got[2], x + 2);
    EXPECT_EQ(got[3], x);
    EXPECT_EQ(got[4], x + 3);
    EXPECT_EQ(got[5], ((x + 4) & 0xffffu) | ((x + 5) & 0xffu) << 16 | ((x + 6) & 0xffu) << 24);
    EXPECT_EQ(got[6], static_cast<std::uint32_t>(square));
    EXPECT_EQ(got[7], static_cast<std::uint32_t>(square >> 32));
    for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(got[8 + i], t % 3 != 0 ? x + 7 + i : 0);
    for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(got[12 + i], got[4 + i]);
  }
  EXPECT_EQ(out[16 * kThreads], in[5]);
  EXPECT_EQ(out[16 * kThreads + 1], in[6]);
}

TEST_F(Conformance, Warps) {
  Words in;
  for (std::size_t t = 0; t < kThreads; ++t) in.push_back(bits(static_cast<float>(t * 7 % 23) + 1));
  const Words out = run(launch_warp, in, 26 * kThreads);
  for (std::size_t t = 0; t < kThreads; ++t) {
    SCOPED_TRACE(t);
    const std::uint32_t* const got = out.data() + 26 * t;
    const std::size_t warp = t / 32 * 32, quad = t / 4 * 4, lane = t % 32;
    const float x = number(in[t]);
    float quad_max = 0, quad_sum = 0, warp_sum = 0, warp_max = 0;
    int prefix = 0;
    std::uint32_t least = ~0u, largest = 0, sum = 0, any = 0, ballot = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      quad_max = std::fmax(quad_max, number(in[quad + i]));
      quad_sum += number(in[quad + i]);
    }
    for (std::size_t i = 0; i < 32; ++i) {
      const std::uint32_t word = in[warp + i];
      warp_sum += number(word);
      warp_max = std::fmax(warp_max, number(word));
      if (i <= lane) prefix += static_cast<int>(number(word));
      least = std::min(least, word), largest = std::max(largest, word), sum += word;
      any |= word;
      ballot |= (word >> 23 & 1) << i;
    }
    EXPECT_EQ(number(got[0]), quad_max);
    EXPECT_EQ(number(got[1]), quad_sum);
    EXPECT_EQ(number(got[2]), warp_sum);
    EXPECT_EQ(got[3], static_cast<std::uint32_t>(prefix));
    for (std::size_t i = 0; i < 8; ++i) {
      const auto column = static_cast<float>(lane < 16 ? i + 1 : i + 9);
      EXPECT_EQ(number(got[4 + i]), (x + number(in[t ^ 16])) * column);
    }
    for (std::size_t k = 0; k < 4; ++k) EXPECT_EQ(got[12 + k], in[quad + k] + t % 4);
    EXPECT_EQ(got[16], ballot);
    EXPECT_EQ(got[17], in[warp + lane / 2]);
    EXPECT_EQ(got[18], in[lane < 3 ? t : t - 3]);
    EXPECT_EQ(got[19], least);
    EXPECT_EQ(got[20], largest);
    EXPECT_EQ(got[21], sum);
    EXPECT_EQ(got[22], in[t ^ 5]);
    EXPECT_EQ(got[23],
              static_cast<std::uint32_t>(std::popcount(in[t]) + std::countl_zero(in[t] >> 8)));
    EXPECT_EQ(number(got[24]), warp_max);
    EXPECT_EQ(got[25], any);
  }
}

TEST_F(Conformance, Mbarriers) {
  EXPECT_EQ(run(launch_mbarriers, {0}, 12), (Words{0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0}));
}

TEST_F(Conformance, RingOfSlots) {
  const Words in = random_words(20, 5), out = run(launch_ring, in, 61);
  for (std::size_t i = 0; i < 60; ++i) {
    EXPECT_EQ(out[i], 32 * in[i / 3] + 31 * 16 + i % 3 + 1) << i;
  }
  EXPECT_EQ(out[60], 3 * 128 + 2 * 3 * 8 + 2 * 8);  // behind slots and barriers
}

TEST_F(Conformance, NamedBarriers) {
  Words in = random_words(kThreads, 6);
  for (std::uint32_t& word : in) word |= 1;
  in[100] = 0;
  const Words out = run(launch_named_barriers, in, 2 * kThreads);
  for (std::size_t t = 0; t < kThreads; ++t) {
    EXPECT_EQ(out[2 * t], in[t ^ 32]) << t;
    EXPECT_EQ(out[2 * t + 1], t < 64 ? 1u : 0u) << t;
  }
}

TEST_F(Conformance, BlocksOfAClusterReachEachOther) {
  const Words out = run(launch_cluster, {11, 12, 21, 22}, 10);
  EXPECT_EQ(out, (Words{0, 22, 12, 1, 11, 1, 21, 11, 1, 12}));
}

TEST_F(Conformance, KernelsThatBeginEarly) {
  const Words in = random_words(32, 7), out = run(launch_early_kernel, in, 64);
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(out[i], 3 * in[i]);
    EXPECT_EQ(out[32 + i], 3 * in[31 - i] + 1);
  }
}

}  // namespace
}  // namespace winnow::conformance
