// Conformance of the products of a warp.
#include <array>
#include <cmath>
#include <limits>

#include "winnow/core/dtype.h"
#include "winnow/simulator/conformance_test.h"

namespace winnow::conformance {
namespace {

constexpr std::size_t kElements = kMmaRows * kMmaColumns;
using Squares = MmaSquares;

template <class Element>
Element element_of(const Words& words, std::size_t at) {
  Element element;
  element.bits = reinterpret_cast<const std::uint16_t*>(words.data())[at];
  return element;
}

// draw() gives the elements of A and B. `exact`: every sum is representable in f32.
template <class Element>
void expect_products(const auto& run_words, bool exact, const auto& draw) {
  Words in(kElements + 256);
  std::array<float, 2 * kElements> matrices;
  for (std::size_t i = 0; i < 2 * kElements; ++i) {
    const Element element(draw());
    matrices[i] = static_cast<float>(element);
    reinterpret_cast<std::uint16_t*>(in.data())[i] = element.bits;
  }
  for (std::size_t i = 0; i < 256; ++i) in[kElements + i] = bits(draw());
  const auto at = [&](std::size_t matrix, int row, int column) {
    return static_cast<double>(
        matrices[matrix * kElements + static_cast<std::size_t>(row * kMmaColumns + column)]);
  };
  // Element `i` of M or N, and k, of an operand.
  const auto of = [&](std::size_t matrix, bool transposed, int i, int k) {
    return transposed ? at(matrix, k, 16 * Squares::kColumn + i)
                      : at(matrix, 16 * Squares::kRow + i, 16 * Squares::kFirst + k);
  };
  const Words out = run_words(in);
  for (std::size_t thread = 0; thread < 128; ++thread) {
    const auto lane = static_cast<int>(thread % 32), warp = static_cast<int>(thread / 32);
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const auto begin =
          static_cast<double>(number(in[kElements + static_cast<std::size_t>(16 * row + column)]));
      double sum = begin, size = std::abs(begin);
      for (int k = 0; k < 64; ++k) {
        const double product = of(0, (warp & 1) != 0, row, k) * of(1, (warp & 2) != 0, column, k);
        sum += product;
        size += std::abs(product);
      }
      const float got = number(out[8 * thread + static_cast<std::size_t>(i)]);
      ASSERT_NEAR(got, sum, exact ? 0 : size * 0x1p-20) << warp << ", " << lane << ", " << i;
      const auto rounded =
          element_of<Element>(out, 2048 + static_cast<std::size_t>(256 * warp + 16 * row + column));
      ASSERT_EQ(rounded.bits, Element(got).bits) << warp << ", " << row << ", " << column;
    }
  }
}

template <class Element>
void expect_all_products(const auto& run_words) {
  std::mt19937 random(31);
  expect_products<Element>(run_words, true, [&] { return static_cast<float>(random() % 17) - 8; });
  std::normal_distribution<float> normal;
  expect_products<Element>(run_words, false, [&] { return normal(random); });
}

TEST_F(Conformance, WarpProductsOfF16) {
  expect_all_products<Half>([](const Words& in) { return run(launch_mma_f16, in, 2048); });
}
TEST_F(Conformance, WarpProductsOfBf16) {
  expect_all_products<BFloat16>([](const Words& in) { return run(launch_mma_bf16, in, 2048); });
}

TEST_F(Conformance, TransposedMatrix) {
  Words in(128);
  for (std::uint32_t i = 0; i < 128; ++i) in[i] = 2 * i << 16 | (2 * i + 1);
  const Words out = run(launch_transpose, in, 128);
  const auto element = [](const Words& words, std::size_t warp, std::size_t row,
                          std::size_t column) {
    return words[32 * warp + 4 * row + column / 2] >> 16 * (column % 2) & 0xffff;
  };
  for (std::size_t warp = 0; warp < 4; ++warp) {
    for (std::size_t row = 0; row < 8; ++row) {
      for (std::size_t column = 0; column < 8; ++column) {
        EXPECT_EQ(element(out, warp, row, column), element(in, warp, column, row))
            << warp << ", " << row << ", " << column;
      }
    }
  }
}

}  // namespace
}  // namespace winnow::conformance
