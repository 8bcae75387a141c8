// tcgen05.mma on arrays: the descriptors of sm_100, where an operand and the sums are, and the
// product. PTX: "Instruction descriptor", "Shared memory descriptor", "Data path layout
// organization". How exact: as wgmma (wgmma.h).
#pragma once

#include <cstdint>
#include <vector>

#include "winnow/simulator/instructions/matrix_descriptor.h"
#include "winnow/simulator/instructions/wgmma.h"

namespace winnow::simulator {

// Of sm_100: the fields of sm_90's stand where they stood, but for bits 46 to 48, which are 1, and
// the swizzle in bits 61 to 63. Throws Misuse "matrix descriptor".
MatrixDescriptor decode_tcgen05_descriptor(std::uint64_t bits);

// What an instruction descriptor of kind::f16 says.
struct Tcgen05Product {
  int m, n;
  MatrixElement element;  // bf16 or f16, of both operands; sums are f32
  MatrixMajor major_a, major_b;
};
// `blocks`: cta_group. Throws Misuse "instruction descriptor": bits without meaning, and what the
// simulator does not model: sums in f16, sparse operands, saturation, negation, M of 64.
Tcgen05Product decode_instruction_descriptor(std::uint32_t bits, int blocks);

// Where the sum of row i and column j of D stands.
struct TensorPlace {
  int block, lane, column;  // of the pair; the column counts from that of D
};
// A block alone has rows 0 to 127 in its lanes. A pair with M = 256 has 128 rows in each; with
// M = 128 it has 64 rows in each, whose columns from n / 2 on stand in lanes 64 to 127.
TensorPlace tcgen05_place(const Tcgen05Product& product, int blocks, int i, int j);
// Columns that D takes in each block.
int tcgen05_columns(const Tcgen05Product& product, int blocks);

// d[rows][n] += A B^T: a is [16][rows], b is [16][n], with rows a multiple of 64.
void multiply_tcgen05(int rows, int n, const std::vector<float>& a, const std::vector<float>& b,
                      float* d);

}  // namespace winnow::simulator
