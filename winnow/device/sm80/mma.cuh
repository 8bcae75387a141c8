// Matrix products of a warp (mma.sync, sm_80 and newer): 16-bit operands, f32 sums. Device code
// only; the whole warp must call each.
//
// Fragments of lane l, with r = l / 4 and c = 2 (l % 4):
//   d (16 x 8)   d[0], d[1]: row r, columns c and c + 1; d[2], d[3]: those of row r + 8
//   a (16 x 16)  a[0]: row r, columns c and c + 1; a[1]: of row r + 8; a[2], a[3]: 8 columns
//   further b (16 x 8)   b0: rows c and c + 1 of column r; b1: 8 rows further
// So the d of two neighbouring blocks of 8 columns, packed in order, are the a of a next product.
// tile.cuh says how shared memory gives them.
#pragma once

#include <cstdint>

#include "winnow/core/dtype.h"

namespace winnow::device {

// d (16 x 8) += a (16 x 16) b (16 x 8). kType: of the elements of a and b, f16 or bf16.
template <DType kType>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
  static_assert(kType == DType::f16 || kType == DType::bf16);
  if constexpr (kType == DType::f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace winnow::device
