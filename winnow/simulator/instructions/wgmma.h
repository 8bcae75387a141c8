// wgmma.mma_async on arrays: what an instruction reads, and the product that it adds.
//
// How exact: products of two elements are exact in f32. They are added to the accumulator one after
// the other along K, each sum rounded to nearest. A tensor core instead aligns the products of an
// instruction and the accumulator to the largest exponent, drops the bits that its adder has no
// room for (it keeps a few more than f32; with f8 operands Hopper's keeps 13 behind the binary
// point of the largest) and rounds once, towards zero. So results agree within the rounding of the
// tensor core, not bit for bit, except where all partial sums are exact. NaN results are 0x7fffffff
// in both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "winnow/simulator/instructions/matrix_descriptor.h"

namespace winnow::simulator {

enum class MatrixElement : int { bf16, f16, tf32, e4m3, e5m2 };

constexpr int bytes_of(MatrixElement element) {
  return element == MatrixElement::tf32                                    ? 4
         : element == MatrixElement::bf16 || element == MatrixElement::f16 ? 2
                                                                           : 1;
}

inline constexpr int kWgmmaRows = 64;  // M
inline constexpr int kWarpgroup = 128;

// wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B, f32 accumulators.
struct Wgmma {
  int n;
  MatrixElement a, b;
  MatrixMajor major_a = MatrixMajor::k, major_b = MatrixMajor::k;  // imm-trans; A in memory only
  int scale_a = 1, scale_b = 1;                                    // imm-scale: 1 or -1
  bool accumulate = true;                                          // scale-d

  int k() const { return 32 / bytes_of(a); }
};

// Throws Misuse "wgmma": a shape, pair of types, transposition or factor that PTX does not have.
void check_wgmma(const Wgmma& wgmma);

// They return an operand as floats: step k of row r is at [k * rows + r], with 64 rows for A and n
// for B. This one reads `shared` at the byte offsets `units`, which operand_units() computes.
// Throws Misuse "shared memory" for units outside of it.
std::vector<float> read_operand(std::span<const std::byte> shared,
                                std::span<const std::uint32_t> units, MatrixElement element,
                                MatrixMajor major, int rows);
// A from the registers of the 128 threads.
std::vector<float> read_operand(std::span<const std::uint32_t[4], kWarpgroup> registers,
                                MatrixElement element);

// d[m][n] = scale_a * scale_b * (the sum over k of a[k][m] * b[k][n]), plus d[m][n] with
// `accumulate`.
void multiply(const Wgmma& wgmma, const std::vector<float>& a, const std::vector<float>& b,
              float* d);

// Which element of d, and of A in registers, a thread of the warpgroup (0 to 127) holds.
struct Place {
  int row, column;
};
// Accumulator register i, 0 to n / 2 - 1.
constexpr Place accumulator_place(int thread, int i) {
  return {16 * (thread / 32) + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}
// A register i (0 to 3) holds 1, 2 or 4 elements (`packed`); `e` counts them from the low bits.
constexpr Place a_register_place(int thread, int i, int e, int packed) {
  return {16 * (thread / 32) + thread % 32 / 4 + i % 2 * 8,
          i / 2 * 4 * packed + thread % 4 * packed + e};
}

}  // namespace winnow::simulator
