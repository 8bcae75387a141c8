// Micro-kernels for the wrappers of winnow/device/sm100, as those of conformance.h. They run in
// clusters of `blocks` (1 or 2) blocks of 128 threads, which all read the same `in` unless it says
// [blocks].
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/simulator/conformance.h"

namespace winnow::conformance {

// One product, added twice. in: descriptors of A and B (64 bits each, their addresses relative to
// the operands' memory) and of the instruction, then [blocks][kOperandWords] of shared memory.
// out: [blocks][128 lanes][256 columns] of tensor memory.
inline constexpr int kProductWords = 8, kOperandWords = 12288, kTensorColumns = 256;
void launch_product_1(const std::uint32_t* in, std::uint32_t* out);
void launch_product_2(const std::uint32_t* in, std::uint32_t* out);

// in: [128 lanes][32 columns], which tcgen05.st writes at column 32. out: the same as
// tcgen05.ld.32x32b reads it, then as 16x256b does: [8 groups of 16 lanes][32 threads][16].
void launch_tensor_moves(const std::uint32_t* in, std::uint32_t* out);

// in: [2][128 lanes][8 columns] in shared memory, as rows without a swizzle: [lanes / 8][two
// halves][8 lanes][4]. out: [2][128][8], as tcgen05.cp has written it.
void launch_tensor_copy(const std::uint32_t* in, std::uint32_t* out);

// in: the words of a tensor of kGatherRows rows of kGatherStride bytes, of which kGatherColumns
// bf16 count; then [2][4] rows, and a column. out: [2][4 rows][128 bytes] gathered into the
// 128-byte swizzle, [2][4][64 bytes] into the 64-byte swizzle, and three boxes [2][8][128]: the
// one at (0, 3) that the even block has sent to both; the own one at (column, 32 rank); and that at
// (column, 4, 2 + rank) of the tensor as planes of kGatherPlaneRows rows, four rows of two planes.
inline constexpr int kGatherRows = 37, kGatherColumns = 72, kGatherStride = 160;
inline constexpr int kGatherPlaneRows = 6;
inline constexpr std::size_t kGatherWords = 128 + 64 + 3 * 256;  // of out, for each of the two
void launch_gather(const std::uint32_t* in, std::uint32_t* out);

}  // namespace winnow::conformance
