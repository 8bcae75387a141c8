// What CuTe (CUTLASS 4.2, evaluated on the host) says of the operands, descriptors and layouts that
// the kernels use: conformance_cute_test compares wrappers and simulator with it. Plain C++, so
// that only conformance_cute.cc sees CuTe's headers.
#pragma once

#include <cstdint>

namespace winnow::cute_oracle {

// The layout in shared memory of a bf16 operand that is 64 long in K. CuTe tiles its canonical
// atoms to this size, as the kernels tile their chunks.
enum class Operand {
  k,     // K-major, 128-byte swizzle: a row of M or N is 128 bytes
  mn,    // MN-major, 128-byte swizzle: a chunk is 64 of M or N for all 64 steps; chunks in a row
  mn64,  // MN-major, 64-byte swizzle: a chunk is 32 of M or N
};
inline constexpr int kSteps = 64;

// The byte offset of element (row, k) of an operand that has `rows` rows of M or N: 32 (not for
// Operand::mn), 64 or 128.
std::uint32_t place(Operand operand, int rows, int row, int k);

// The matrix descriptors, of tcgen05.mma and of wgmma, for the 16 steps of K from 16 * k16 on of
// such an operand at shared address `start`, a multiple of 1024.
std::uint64_t sm100_descriptor(Operand operand, int rows, std::uint32_t start, int k16);
std::uint64_t sm90_descriptor(Operand operand, int rows, std::uint32_t start, int k16);

// A tcgen05.mma of two blocks of a cluster (cta_group::2): M = 128 or 256, N = 64, 128 or 256.
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

// Where in tensor memory element (i, j) of the result is.
struct TensorPlace {
  int block, lane, column;
};
TensorPlace sum(const PairProduct& product, int i, int j);

// What register `r` (of 16) of lane `thread` of a warp has after tcgen05.ld.32x32b.x16, and after
// tcgen05.ld.16x256b.x4; `lane` is relative to the lane of the address. tcgen05.st.32x32b is alike.
TensorPlace load_32x32b(int thread, int r);
TensorPlace load_16x256b(int thread, int r);

}  // namespace winnow::cute_oracle
