// The 64-bit descriptors by which wgmma names an operand in shared memory (PTX: "Shared memory
// matrix layout", "Matrix descriptor format"), and where the operand's elements are.
//
// The smallest piece is a unit of 16 bytes, whole in every layout:
//   K-major:  a unit holds neighbours along K of one row of M or N; an operand has 2 in each row.
//   MN-major: a unit holds 8 neighbours of M or N of one step of K (16-bit elements only).
// Eight rows (of M or N, or of K) of a layout's width follow each other densely. With W units to a
// width (1, 2, 4, 8 for no swizzle, 32, 64, 128 bytes):
//   K-major:  the next 8 rows are a stride offset away; the second unit of a row is beside the
//             first, without a swizzle a leading offset away.
//   MN-major: the next 8 steps of K are a stride offset away and the next W units a leading offset;
//             without a swizzle the other way round.
// The swizzle then replaces bits 4 and up of the address by their exclusive or with bits 7 and up:
// 3, 2 or 1 of them.
#pragma once

#include <cstdint>
#include <vector>

namespace winnow::simulator {

struct MatrixDescriptor {
  std::uint32_t start;            // address in the shared window
  std::uint32_t leading, stride;  // bytes
  int base_offset;                // rows of 128 bytes from a multiple of the pattern to its start
  int width;                      // bytes of the swizzle: 16 (none), 32, 64 or 128

  // The rows of 128 bytes after which the swizzle's pattern repeats: 1, 2, 4 or 8.
  int pattern_rows() const { return width / 16; }
};

// Throws Misuse "matrix descriptor": a bit that has no meaning is set, or the start is in the midst
// of the swizzle's pattern, the base offset taken into account.
MatrixDescriptor decode_matrix_descriptor(std::uint64_t bits);

// The address with the swizzle of `width` bytes applied; `base_offset` as above. Patterns that do
// not begin at a multiple of their size are counted from where they begin: the document gives no
// formula, and no wrapper uses one.
std::uint32_t swizzled(std::uint32_t address, int width, int base_offset = 0);

enum class MatrixMajor : int { k = 0, mn = 1 };

// Addresses of the units of an operand: K-major [rows][2]; MN-major [steps of K][rows / 8], for
// 16 steps.
std::vector<std::uint32_t> operand_units(const MatrixDescriptor& descriptor, MatrixMajor major,
                                         int rows);

}  // namespace winnow::simulator
