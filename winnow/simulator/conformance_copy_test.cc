// Conformance of copies and matrix instructions. Images are those of the 128-byte swizzle: the unit
// of 16 bytes in column c of row r stands at column c ^ (r % 8).
#include <cmath>
#include <cstring>

#include "winnow/core/dtype.h"
#include "winnow/simulator/conformance_test.h"

namespace winnow::conformance {
namespace {

// Byte offset of byte `column` (0 to 127) of `row` of an image.
std::size_t swizzled_byte(std::size_t row, std::size_t column) {
  return row * 128 + ((column / 16) ^ (row % 8)) * 16 + column % 16;
}

std::uint8_t byte_of(const Words& words, std::size_t at) {
  return reinterpret_cast<const std::uint8_t*>(words.data())[at];
}

TEST_F(Conformance, CopiesOf16BytesWithZeroFill) {
  Words in = random_words(2048, 11);
  for (std::size_t i = 0; i < 512; ++i) in.push_back(i % 5 != 3);
  const Words out = run(launch_cp_async, in, 2048);
  for (std::size_t at = 0; at < 8192; ++at) {
    const bool there = in[2048 + at / 16] != 0;
    ASSERT_EQ(byte_of(out, swizzled_byte(at / 128, at % 128)), there ? byte_of(in, at) : 0) << at;
  }
}

TEST_F(Conformance, CopiesOfWordsWithZeroFill) {
  Words in = random_words(512, 18);
  for (std::size_t i = 0; i < 512; ++i) in.push_back(i % 7 != 2);
  const Words out = run(launch_cp_async_words, in, 512);
  for (std::size_t i = 0; i < 512; ++i) {
    ASSERT_EQ(out[511 - i], in[512 + i] != 0 ? in[i] : 0) << i;
  }
}

TEST_F(Conformance, GroupsOfCopies) {
  const Words in = random_words(1024, 19), out = run(launch_cp_async_groups, in, 1024);
  EXPECT_EQ(out, in);
}

TEST_F(Conformance, BulkCopies) {
  const Words in = random_words(1024, 12), out = run(launch_bulk, in, 1024);
  for (std::size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], in[i] + i) << i;
}

TEST_F(Conformance, BulkCopiesOfWhatTheKernelWrote) {
  const Words in = random_words(32, 17), out = run(launch_global_proxy, in, 64);
  for (std::size_t i = 0; i < 64; ++i) ASSERT_EQ(out[i], in[i % 32] + 1) << i;
}

TEST_F(Conformance, BoxesOfTensors) {
  const Words in = random_words(2048, 13);
  const std::size_t plane_bytes = 2 * kPlaneBox[0] * kPlaneBox[1];
  const std::size_t cube_bytes = kCubeBox[0] * kCubeBox[1] * kCubeBox[2];
  const Words out =
      run(launch_tensor, in,
          (plane_bytes * std::size(kBoxes.plane) + cube_bytes * std::size(kBoxes.cube)) / 4);
  std::size_t begin = 0;
  for (const auto& at : kBoxes.plane) {
    for (int row = 0; row < static_cast<int>(kPlaneBox[1]); ++row) {
      for (int byte = 0; byte < 128; ++byte) {
        const int x = at[0] + byte / 2, y = at[1] + row;
        const bool inside = x >= 0 && x < kPlaneColumns && y >= 0 && y < kPlaneRows;
        const int from = y * kPlaneStride + 2 * x + byte % 2;
        ASSERT_EQ(byte_of(out, begin + swizzled_byte(static_cast<std::size_t>(row),
                                                     static_cast<std::size_t>(byte))),
                  inside ? byte_of(in, static_cast<std::size_t>(from)) : 0)
            << "plane " << at[0] << ", " << at[1] << ": row " << row << ", byte " << byte;
      }
    }
    begin += plane_bytes;
  }
  for (const auto& at : kBoxes.cube) {
    for (int row = 0; row < static_cast<int>(kCubeBox[1] * kCubeBox[2]); ++row) {
      for (int byte = 0; byte < 128; ++byte) {
        const int x = at[0] + byte, y = at[1] + row % static_cast<int>(kCubeBox[1]);
        const int z = at[2] + row / static_cast<int>(kCubeBox[1]);
        const bool inside =
            x >= 0 && x < kCubeColumns && y >= 0 && y < kCubeRows && z >= 0 && z < kCubePlanes;
        const int from = z * kCubePlaneStride + y * kCubeRowStride + x;
        ASSERT_EQ(byte_of(out, begin + swizzled_byte(static_cast<std::size_t>(row),
                                                     static_cast<std::size_t>(byte))),
                  inside ? byte_of(in, static_cast<std::size_t>(from)) : 0)
            << "cube " << at[0] << ", " << at[1] << ", " << at[2] << ": row " << row << ", byte "
            << byte;
      }
    }
    begin += cube_bytes;
  }
}

TEST_F(Conformance, MatrixMoves) {
  const Words in = random_words(2048, 14), out = run(launch_matrix_moves, in, 4096);
  for (std::size_t thread = 0; thread < 128; ++thread) {
    for (std::size_t i = 0; i < 16; ++i) {
      const std::size_t row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      const std::size_t column = i / 4 * 16 + i % 4 / 2 * 8 + thread % 4 * 2;
      const std::size_t word = swizzled_byte(row, 2 * column) / 4;
      EXPECT_EQ(out[16 * thread + i], in[word]);
      EXPECT_EQ(out[2048 + word], in[word] + 1);
    }
  }
}

// A matrix of n rows along K, as numbers and as the image that an instruction reads.
class Operand {
 public:
  Operand(int rows, int k, bool f8, bool transposed)
      : k_(k), f8_(f8), transposed_(transposed), values_(static_cast<std::size_t>(rows * k)) {}

  // Gives an element its value, rounded to its type.
  void set(int row, int k, float value, Words& image, std::size_t image_begin) {
    float& number_of = values_[static_cast<std::size_t>(row * k_ + k)];
    auto* const bytes = reinterpret_cast<std::uint8_t*>(image.data()) + image_begin;
    if (f8_) {
      const Float8E4M3 element(value);
      number_of = static_cast<float>(element);
      bytes[place(row, k, 1)] = element.bits;
    } else {
      const BFloat16 element(value);
      number_of = static_cast<float>(element);
      std::memcpy(bytes + place(row, k, 2), &element.bits, 2);
    }
  }
  float at(int row, int k) const { return values_[static_cast<std::size_t>(row * k_ + k)]; }

 private:
  // Chunks hold 64 rows of the operand, or of K if it is transposed, and 128 bytes of each.
  std::size_t place(int row, int k, int size) const {
    const auto line = static_cast<std::size_t>(transposed_ ? k : row % 64);
    const auto column = static_cast<std::size_t>((transposed_ ? row % 64 : k) * size);
    return static_cast<std::size_t>(row / 64) * 8192 + swizzled_byte(line, column);
  }
  int k_;
  bool f8_, transposed_;
  std::vector<float> values_;
};

// What a product gives for elements by `draw`, and the largest error in units of the sum of
// magnitudes.
template <class Draw>
double largest_error(const ProductLaunch& product, const Draw& draw, const auto& run_words) {
  const int k = product.f8 ? 128 : 64;
  Words in(5 * 2048 + 64 * kMaxProductColumns, 0);
  Operand a(64, k, product.f8, product.a_transposed);
  Operand b(product.n, k, product.f8, product.b_transposed);
  for (int step = 0; step < k; ++step) {
    for (int row = 0; row < 64; ++row) a.set(row, step, draw(), in, 0);
    for (int row = 0; row < product.n; ++row) b.set(row, step, draw(), in, 8192);
  }
  for (std::size_t i = 5 * 2048; i < in.size(); ++i) in[i] = bits(draw());
  const auto half = static_cast<std::size_t>(product.n / 2);
  const Words out = run_words(product.launch, in, 128 * half);
  double worst = 0;
  for (std::size_t thread = 0; thread < 128; ++thread) {
    for (std::size_t i = 0; i < half; ++i) {
      const auto row = static_cast<int>(thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8);
      const auto column = static_cast<int>(i / 4 * 8 + thread % 4 * 2 + i % 2);
      double want =
          number(in[static_cast<std::size_t>(5 * 2048 + kMaxProductColumns * row + column)]);
      double magnitude = std::fabs(want);
      for (int step = 0; step < k; ++step) {
        const double product_of = static_cast<double>(a.at(row, step)) * b.at(column, step);
        const double term = product.negated ? -product_of : product_of;
        want += term, magnitude += std::fabs(term);
      }
      const float got = number(out[thread * half + i]);
      EXPECT_FALSE(got == 0 && std::signbit(got));  // as sums of split f8 scores rely on
      const double error = std::fabs(got - want) / magnitude;
      if (!(error <= worst)) worst = std::isnan(error) && got == want ? worst : error;
    }
  }
  return worst;
}

TEST_F(Conformance, TwoProductsAtOnce) {
  std::mt19937 random(18);
  Words in(3 * 2048, 0);
  Operand a(64, 16, false, false), b(128, 16, false, false);
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row) a.set(row, k, static_cast<float>(random() % 7) - 3, in, 0);
    for (int row = 0; row < 128; ++row) {
      b.set(row, k, static_cast<float>(random() % 7) - 3, in, 8192);
    }
  }
  const Words out = run(launch_two_products, in, 2 * 128 * 32);
  for (std::size_t n = 0; n < out.size(); ++n) {
    const std::size_t thread = n / 32 % 128, i = n % 32;
    const auto row = static_cast<int>(thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8);
    const auto column = static_cast<int>(n / 4096 * 64 + i / 4 * 8 + thread % 4 * 2 + i % 2);
    float want = 0;
    for (int k = 0; k < 16; ++k) want += a.at(row, k) * b.at(column, k);
    ASSERT_EQ(number(out[n]), want) << "row " << row << ", column " << column;
  }
}

TEST_F(Conformance, ProductsOfIntegersAreExact) {
  for (const ProductLaunch& product : kProducts) {
    std::mt19937 random(15);
    const auto draw = [&] { return static_cast<float>(random() % 7) - 3; };
    EXPECT_EQ(largest_error(product, draw, run), 0.0)
        << "n " << product.n << ", A " << product.a_in_registers << product.a_transposed << ", B "
        << product.b_transposed << ", f8 " << product.f8;
  }
}

TEST_F(Conformance, ProductsAreWithinTheRounding) {
  for (const ProductLaunch& product : kProducts) {
    std::mt19937 random(16);
    std::normal_distribution<float> normal;
    const auto draw = [&] { return normal(random); };
    // Addends are cut off where the largest of an instruction has 13 bits behind its point, or the
    // 25 or so of bf16 operands.
    EXPECT_LE(largest_error(product, draw, run), product.f8 ? 0x1p-9 : 0x1p-19)
        << "n " << product.n << ", A " << product.a_in_registers << product.a_transposed << ", B "
        << product.b_transposed << ", f8 " << product.f8;
  }
}

}  // namespace
}  // namespace winnow::conformance
