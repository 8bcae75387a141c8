// The descriptors by which tcgen05.mma names its operands in shared memory, its shape and types.
// Operands are chunks as on sm90 (device/sm90/chunk.cuh): rows of 64 bf16 in the 128-byte swizzle,
// or rows of 32 in the 64-byte swizzle.
#pragma once

#include <cstdint>

#include "winnow/device/sm90/chunk.cuh"

namespace winnow::device {

// Fields, in units of 16 bytes: start address (bits 0-13), leading offset (16-29), stride offset
// (32-45); 1 in bits 46-48; the swizzle in bits 61-63: 2 is that of 128 bytes, 4 that of 64.
namespace tcgen05_descriptor {
constexpr std::uint64_t kVersion = std::uint64_t{1} << 46;
constexpr std::uint64_t kSwizzle128 = std::uint64_t{2} << 61;
constexpr std::uint64_t kSwizzle64 = std::uint64_t{4} << 61;
// In a cluster the number of the block stands in the highest bits of an address.
__host__ __device__ constexpr std::uint64_t make(std::uint32_t start, std::uint32_t leading,
                                                 std::uint32_t stride, std::uint64_t swizzle) {
  return swizzle | kVersion | static_cast<std::uint64_t>(stride >> 4) << 32 |
         static_cast<std::uint64_t>(leading >> 4) << 16 | (start & 0x3ffffu) >> 4;
}
}  // namespace tcgen05_descriptor

// K-major operand: rows are M or N, each 128 bytes of K; 8 rows every 1024 bytes. The next step of
// 16 columns begins 32 bytes further (the leading offset is not used with a swizzle).
__host__ __device__ constexpr std::uint64_t tcgen05_k_major(std::uint32_t start) {
  return tcgen05_descriptor::make(start, 16, 1024, tcgen05_descriptor::kSwizzle128);
}

// MN-major operand: rows are K, columns M or N, 64 of them in each of the chunks that follow each
// other `leading` bytes apart. The next step of 16 rows begins 2048 bytes further.
__host__ __device__ constexpr std::uint64_t tcgen05_mn_major(std::uint32_t start,
                                                             std::uint32_t leading) {
  return tcgen05_descriptor::make(start, leading, 1024, tcgen05_descriptor::kSwizzle128);
}

// The same of rows of 64 bytes: 32 of M or N. The next step of 16 rows begins 1024 bytes further.
__host__ __device__ constexpr std::uint64_t tcgen05_mn_major_64(std::uint32_t start,
                                                                std::uint32_t leading) {
  return tcgen05_descriptor::make(start, leading, 512, tcgen05_descriptor::kSwizzle64);
}

// The instruction descriptor of bf16 operands and f32 sums, kind::f16. M and N are those of the
// whole pair with cta_group::2, in which each block holds half of the rows of A and of B.
__host__ __device__ constexpr std::uint32_t tcgen05_bf16(int m, int n, Major a, Major b) {
  return 1u << 4 | 1u << 7 | 1u << 10 | static_cast<std::uint32_t>(a) << 15 |
         static_cast<std::uint32_t>(b) << 16 | static_cast<std::uint32_t>(n / 8) << 17 |
         static_cast<std::uint32_t>(m / 16) << 24;
}

}  // namespace winnow::device
