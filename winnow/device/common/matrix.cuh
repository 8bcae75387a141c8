// Fragments of matrices: from shared memory (ldmatrix), and transposed (movmatrix). Device code
// only; the whole warp must call each.
#pragma once

#include <cstdint>

namespace winnow::device {

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
// l / 8, 16 bytes at a multiple of 16; register i gets of matrix i row l / 4, columns
// 2 (l % 4) + {0, 1}.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t address, std::uint32_t& r0,
                                            std::uint32_t& r1, std::uint32_t& r2,
                                            std::uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: of matrix i column l / 4, rows 2 (l % 4) + {0, 1}.
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t address, std::uint32_t& r0,
                                                  std::uint32_t& r1, std::uint32_t& r2,
                                                  std::uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// The transposed matrix of an 8x8 matrix of 16-bit elements that the lanes have as ldmatrix gives
// it: lane l has of row l / 4 columns 2 (l % 4) + {0, 1}.
__device__ __forceinline__ std::uint32_t movmatrix_trans(std::uint32_t of_row) {
  std::uint32_t of_column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_column) : "r"(of_row));
  return of_column;
}

}  // namespace winnow::device
