// Descriptors and products of wgmma against the layouts that CUTLASS documents (canonical layouts
// of cute/atom/mma_traits_sm90_gmma.hpp), written here as shapes and strides and walked as CuTe
// walks them, and against products of small integers, which are exact.
#include <bit>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/dtype.h"
#include "winnow/simulator/instructions/test_misuse.h"
#include "winnow/simulator/instructions/wgmma.h"

namespace winnow::simulator {
namespace {

using Shared = std::vector<std::byte>;

// The offset of index `i` in a mode with this shape and these strides: the first part runs fastest.
int walk(int i, const std::vector<std::pair<int, int>>& parts) {
  int offset = 0;
  for (const auto& [size, stride] : parts) {
    offset += i % size * stride;
    i /= size;
  }
  return offset;
}

struct Layout {
  int width;            // of the swizzle in bytes
  int leading, stride;  // bytes
  std::uint64_t swizzle_bits;
};
// The strides are larger than the tiles need, and differ, so that no exchange of them goes unseen.
const Layout kLayouts[] = {
    {16, 4224, 1152, 0}, {32, 9216, 1280, 3}, {64, 10240, 1536, 2}, {128, 12288, 2048, 1}};

// Byte offset of element (row, k) of T = 16 / size elements to a unit, from the descriptor's start
// as if it stood at a multiple of 1024.
int k_major_offset(const Layout& layout, int size, int row, int k) {
  const int t = 16 / size, w = layout.width / 16;
  const int second = w == 1 ? layout.leading / size : t;
  return size * (walk(row, {{8, w * t}, {1 << 20, layout.stride / size}}) +
                 walk(k, {{t, 1}, {2, second}}));
}
int mn_major_offset(const Layout& layout, int size, int row, int k) {
  const int t = 16 / size, w = layout.width / 16;
  const int outer = w == 1 ? layout.stride : layout.leading;
  const int steps = w == 1 ? layout.leading : layout.stride;
  return size * (walk(row, {{t, 1}, {w, t}, {1 << 20, outer / size}}) +
                 walk(k, {{8, w * t}, {1 << 20, steps / size}}));
}
// Swizzle<B, 4, 3> of CuTe on byte addresses, with B the logarithm of the width's units.
int cute_swizzle(int address, int width) {
  const int bits = std::countr_zero(static_cast<unsigned>(width / 16));
  return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4);
}

std::uint64_t describe(const Layout& layout, int start, int base_offset = 0) {
  return static_cast<std::uint64_t>(start >> 4) |
         static_cast<std::uint64_t>(layout.leading >> 4) << 16 |
         static_cast<std::uint64_t>(layout.stride >> 4) << 32 |
         static_cast<std::uint64_t>(base_offset) << 49 | layout.swizzle_bits << 62;
}

// Small integers that every type holds exactly.
std::uint32_t encode(MatrixElement element, int value) {
  const auto x = static_cast<float>(value);
  switch (element) {
    case MatrixElement::bf16:
      return BFloat16(x).bits;
    case MatrixElement::f16:
      return Half(x).bits;
    case MatrixElement::tf32:
      return std::bit_cast<std::uint32_t>(x);
    case MatrixElement::e4m3:
      return Float8E4M3(x).bits;
    case MatrixElement::e5m2:
      return static_cast<std::uint32_t>(Half(x).bits) >> 8;
  }
  return 0;
}

// A matrix of integers from -3 to 3, [rows][k].
std::vector<int> integers(int rows, int k, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> values(static_cast<std::size_t>(rows * k));
  for (int& value : values) value = static_cast<int>(random() % 7) - 3;
  return values;
}

// Stores the matrix at `start` (0 modulo 128 where there is a swizzle, but for steps along K).
template <class Offset>
void store(Shared& shared, const Layout& layout, int start, MatrixElement element, int rows, int k,
           const std::vector<int>& values, const Offset& offset_of) {
  const int size = bytes_of(element);
  for (int row = 0; row < rows; ++row) {
    for (int step = 0; step < k; ++step) {
      const int at = cute_swizzle(start + offset_of(layout, size, row, step), layout.width);
      const std::uint32_t bits = encode(element, values[static_cast<std::size_t>(row * k + step)]);
      std::memcpy(shared.data() + at, &bits, static_cast<std::size_t>(size));
    }
  }
}

void expect_same(const std::vector<float>& operand, const std::vector<int>& values, int rows,
                 int k) {
  ASSERT_EQ(operand.size(), static_cast<std::size_t>(rows * k));
  for (int row = 0; row < rows; ++row) {
    for (int step = 0; step < k; ++step) {
      ASSERT_EQ(operand[static_cast<std::size_t>(step * rows + row)],
                static_cast<float>(values[static_cast<std::size_t>(row * k + step)]))
          << "row " << row << ", k " << step;
    }
  }
}

constexpr MatrixElement kElements[] = {MatrixElement::bf16, MatrixElement::f16, MatrixElement::tf32,
                                       MatrixElement::e4m3, MatrixElement::e5m2};

TEST(MatrixDescriptor, KMajorOperandsAreReadInEveryLayoutAndType) {
  for (const Layout& layout : kLayouts) {
    for (const MatrixElement element : kElements) {
      for (const int rows : {8, 64, 200}) {
        // Steps along K begin inside of a swizzled row.
        for (int start = 1024; start < 1024 + layout.width; start += 32) {
          SCOPED_TRACE(::testing::Message()
                       << "width " << layout.width << ", element " << static_cast<int>(element)
                       << ", rows " << rows << ", start " << start);
          const int k = 32 / bytes_of(element);
          const std::vector<int> values = integers(rows, k, 1);
          Shared shared(160 * 1024, std::byte{0xff});
          store(shared, layout, start, element, rows, k, values, k_major_offset);
          const MatrixDescriptor descriptor = decode_matrix_descriptor(describe(layout, start));
          expect_same(read_operand(shared, operand_units(descriptor, MatrixMajor::k, rows), element,
                                   MatrixMajor::k, rows),
                      values, rows, k);
        }
      }
    }
  }
}

TEST(MatrixDescriptor, MnMajorOperandsAreReadInEveryLayout) {
  for (const Layout& layout : kLayouts) {
    for (const MatrixElement element : {MatrixElement::bf16, MatrixElement::f16}) {
      for (const int rows : {8, 64, 256}) {
        SCOPED_TRACE(::testing::Message() << "width " << layout.width << ", rows " << rows);
        const std::vector<int> values = integers(rows, 16, 2);
        Shared shared(160 * 1024, std::byte{0xff});
        store(shared, layout, 3072, element, rows, 16, values, mn_major_offset);
        const MatrixDescriptor descriptor = decode_matrix_descriptor(describe(layout, 3072));
        expect_same(read_operand(shared, operand_units(descriptor, MatrixMajor::mn, rows), element,
                                 MatrixMajor::mn, rows),
                    values, rows, 16);
      }
    }
  }
}

TEST(MatrixDescriptor, FieldsAreTakenApart) {
  const MatrixDescriptor descriptor = decode_matrix_descriptor(
      std::uint64_t{0x3ff8} | std::uint64_t{0x2abc} << 16 | std::uint64_t{0x1234} << 32 |
      std::uint64_t{7} << 49 | std::uint64_t{1} << 62);
  EXPECT_EQ(descriptor.start, 0x3ff80u);
  EXPECT_EQ(descriptor.leading, 0x2abc0u);
  EXPECT_EQ(descriptor.stride, 0x12340u);
  EXPECT_EQ(descriptor.base_offset, 7);
  EXPECT_EQ(descriptor.width, 128);
}

TEST(MatrixDescriptor, ABaseOffsetMovesThePattern) {
  // With a base offset equal to its row, a start in the midst of 1024 bytes reads as an aligned
  // one.
  const MatrixDescriptor aligned = decode_matrix_descriptor(describe(kLayouts[3], 2048));
  const MatrixDescriptor moved = decode_matrix_descriptor(describe(kLayouts[3], 2048 + 384, 3));
  const auto units = operand_units(aligned, MatrixMajor::k, 64);
  const auto moved_units = operand_units(moved, MatrixMajor::k, 64);
  for (std::size_t i = 0; i < units.size(); ++i) EXPECT_EQ(moved_units[i], units[i] + 384);
}

TEST(MatrixDescriptor, BitsWithoutMeaningAreReported) {
  const std::uint64_t good = describe(kLayouts[3], 1024);
  for (const int bit : {14, 15, 30, 31, 46, 47, 48, 52, 61}) {
    expect_misuse([&] { decode_matrix_descriptor(good | std::uint64_t{1} << bit); },
                  "matrix descriptor", ("bit " + std::to_string(bit) + " is set").c_str());
  }
  expect_misuse([&] { decode_matrix_descriptor(describe(kLayouts[3], 1024 + 256)); },
                "matrix descriptor", "the start 1280 is in row 2 of the pattern");
  expect_misuse([&] { decode_matrix_descriptor(describe(kLayouts[3], 1024, 1)); },
                "matrix descriptor", "the base offset is 1");
  expect_misuse([&] { decode_matrix_descriptor(describe(kLayouts[0], 1024, 1)); },
                "matrix descriptor", "a base offset without a swizzle");
}

TEST(Wgmma, OperandsOutsideOfSharedMemoryAreReported) {
  const Shared shared(8192);
  const auto units =
      operand_units(decode_matrix_descriptor(describe(kLayouts[3], 1024)), MatrixMajor::k, 64);
  expect_misuse([&] { read_operand(shared, units, MatrixElement::bf16, MatrixMajor::k, 64); },
                "shared memory", "outside of the 8192 bytes");
}

TEST(Wgmma, WhatPtxDoesNotHaveIsReported) {
  const MatrixElement bf16 = MatrixElement::bf16, e4m3 = MatrixElement::e4m3;
  for (const int n : {0, 4, 12, 264}) {
    expect_misuse([&] { check_wgmma({.n = n, .a = bf16, .b = bf16}); }, "wgmma",
                  ("n is " + std::to_string(n)).c_str());
  }
  expect_misuse([&] { check_wgmma({.n = 8, .a = bf16, .b = MatrixElement::f16}); }, "wgmma",
                "types differ");
  expect_misuse([&] { check_wgmma({.n = 8, .a = e4m3, .b = e4m3, .major_b = MatrixMajor::mn}); },
                "wgmma", "may be transposed");
  expect_misuse([&] { check_wgmma({.n = 8, .a = bf16, .b = bf16, .scale_b = 0}); }, "wgmma",
                "a factor of 0");
  check_wgmma({.n = 256, .a = e4m3, .b = MatrixElement::e5m2});
}

// The operand as read_operand() gives it.
std::vector<float> operand_of(const std::vector<int>& values, int rows, int k) {
  std::vector<float> operand(values.size());
  for (int row = 0; row < rows; ++row) {
    for (int step = 0; step < k; ++step) {
      operand[static_cast<std::size_t>(step * rows + row)] =
          static_cast<float>(values[static_cast<std::size_t>(row * k + step)]);
    }
  }
  return operand;
}

TEST(Wgmma, ProductsOfIntegersAreExact) {
  for (const MatrixElement element : kElements) {
    for (const int n : {8, 24, 256}) {
      for (const bool accumulate : {false, true}) {
        for (const int scale : {1, -1}) {
          const Wgmma wgmma{
              .n = n, .a = element, .b = element, .scale_b = scale, .accumulate = accumulate};
          const int k = wgmma.k();
          const std::vector<int> a = integers(64, k, 3), b = integers(n, k, 4);
          std::vector<float> d(static_cast<std::size_t>(64 * n));
          std::iota(d.begin(), d.end(), -100.0f);
          std::vector<float> want(d.size());
          for (int row = 0; row < 64; ++row) {
            for (int column = 0; column < n; ++column) {
              int sum = 0;
              for (int step = 0; step < k; ++step) {
                sum += a[static_cast<std::size_t>(row * k + step)] *
                       b[static_cast<std::size_t>(column * k + step)];
              }
              const auto at = static_cast<std::size_t>(row * n + column);
              want[at] = static_cast<float>(scale * sum) + (accumulate ? d[at] : 0.0f);
            }
          }
          multiply(wgmma, operand_of(a, 64, k), operand_of(b, n, k), d.data());
          ASSERT_EQ(d, want);
        }
      }
    }
  }
}

TEST(Wgmma, NotANumberHasOneForm) {
  const Wgmma wgmma{.n = 8, .a = MatrixElement::bf16, .b = MatrixElement::bf16};
  std::vector<float> a(64 * 16, 0.0f), b(8 * 16, 0.0f), d(64 * 8, 0.0f);
  a[5] = std::bit_cast<float>(0xffff0000u);  // row 5
  multiply(wgmma, a, b, d.data());
  EXPECT_EQ(std::bit_cast<std::uint32_t>(d[5 * 8 + 3]), 0x7fffffffu);
  EXPECT_EQ(d[4 * 8 + 3], 0.0f);
}

// Places by the figures of the PTX document: a row of 8 numbers lies in four neighbouring lanes.
TEST(Wgmma, ThreadsHoldTheElementsOfTheDocument) {
  std::set<std::pair<int, int>> places;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < 12; ++i) {
      const Place place = accumulator_place(thread, i);
      EXPECT_EQ(place.row % 16 % 8 * 4 + place.column % 8 / 2, thread % 32);
      EXPECT_EQ(place.row / 16, thread / 32);
      places.insert({place.row, place.column});
    }
  }
  EXPECT_EQ(places.size(), 64u * 24u);
  EXPECT_EQ(accumulator_place(0, 2).row, 8);
  EXPECT_EQ(accumulator_place(0, 4).column, 8);
  EXPECT_EQ(accumulator_place(33, 7).row, 16 + 8);
  EXPECT_EQ(accumulator_place(33, 7).column, 8 + 2 + 1);
}

TEST(Wgmma, AComesFromRegistersToo) {
  for (const MatrixElement element : kElements) {
    const int size = bytes_of(element), packed = 4 / size, k = 32 / size;
    const std::vector<int> values = integers(64, k, 5);
    std::uint32_t registers[kWarpgroup][4] = {};
    // The document's fragment of A: lane l has of row l / 4 the word l % 4 of each half of K.
    for (int row = 0; row < 64; ++row) {
      for (int step = 0; step < k; ++step) {
        const int word = step / packed;  // 0 to 7
        const int thread = row / 16 * 32 + row % 8 * 4 + word % 4;
        const int i = row % 16 / 8 + 2 * (word / 4);
        registers[thread][i] |= encode(element, values[static_cast<std::size_t>(row * k + step)])
                                << (8 * size * (step % packed));
      }
    }
    expect_same(read_operand(registers, element), values, 64, k);
  }
}

}  // namespace
}  // namespace winnow::simulator
