// What CuTe (CUTLASS 4.2, evaluated on the host) says of the operands, descriptors and layouts that
// the kernels use: conformance_cute_test compares wrappers and simulator with it. Plain C++, so
// that only conformance_cute.cc sees CuTe's headers.
#pragma once

#include <cstdint>

namespace winnow::cute_oracle {

// How a bf16 operand of 64 steps of K stands in shared memory: the tiles that CuTe makes of its
// canonical atoms, as the kernels do of their chunks.
enum class Operand {
  k,     // K-major, 128-byte swizzle: a row of M or N is 128 bytes
  mn,    // MN-major, 128-byte swizzle: 64 of M or N to a chunk of 64 steps, chunk after chunk
  mn64,  // MN-major, 64-byte swizzle: 32 of M or N to a chunk
};
inline constexpr int kSteps = 64;

// Bytes from the operand's start to element `k` of row `row` of M or N, with rows of 32, 64 or 128
// of them in all.
std::uint32_t place(Operand operand, int rows, int row, int k);

// Descriptors of the 16 steps of K from 16 * k16 on of such an operand at `start`, a multiple of
// 1024: of tcgen05.mma and of wgmma.
std::uint64_t sm100_descriptor(Operand operand, int rows, std::uint32_t start, int k16);
std::uint64_t sm90_descriptor(Operand operand, int rows, std::uint32_t start, int k16);

// A product of a pair of blocks: M = 128 or 256, N = 64, 128 or 256.
struct PairProduct {
  int m, n;
  bool a_is_k_major, b_is_k_major;
};
std::uint32_t instruction_descriptor(const PairProduct& product);

// Row i of A or B: its block, and its row there.
struct BlockRow {
  int block, row;
};
BlockRow row_of_a(const PairProduct& product, int i);
BlockRow row_of_b(const PairProduct& product, int j);

// Where the sum of row i and column j stands.
struct TensorPlace {
  int block, lane, column;
};
TensorPlace sum(const PairProduct& product, int i, int j);

// What register `r` (of 16) of lane `thread` of a warp has after tcgen05.ld.32x32b.x16, and after
// tcgen05.ld.16x256b.x4; `lane` counts from that of the address. Stores of 32x32b are the same.
TensorPlace load_32x32b(int thread, int r);
TensorPlace load_16x256b(int thread, int r);

}  // namespace winnow::cute_oracle
