// The chunks of shared memory that wgmma reads, and the descriptors that name them to it.
//
// A chunk is 64 rows of 64 bf16 (128 bytes a row, 8192 bytes), aligned to 1024 bytes, in the
// 128-byte swizzle: the 16-byte column c of row r stands at column c ^ (r & 7). wgmma can read
// the same bytes as either operand:
//   K-major operand:  rows are M or N, the 64 columns are K (Q and K in S = Q K^T, P in P V);
//   MN-major operand: columns are M or N, the 64 rows are K (V in P V).
#pragma once

#include <cstddef>
#include <cstdint>

namespace winnow::device {

inline constexpr int kChunkRows = 64;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkBytes = 8192;

// A chunk as a member of the struct that lays out a kernel's shared memory. That struct begins at a
// multiple of 1024, and its members before a chunk take a multiple of 1024 bytes together.
struct Chunk {
  std::byte bytes[kChunkBytes];
};

// Byte offset in a chunk of the 16-byte column `column16` (0 to 7) of `row`.
__host__ __device__ constexpr std::uint32_t chunk_offset(int row, int column16) {
  return static_cast<std::uint32_t>(row * 128 + ((column16 ^ (row & 7)) << 4));
}

enum class Major : int { K = 0, MN = 1 };

// Descriptor fields, in units of 16 bytes: start address (bits 0-13), leading offset (16-29),
// stride offset (32-45), and the 128-byte swizzle (1 in bits 62-63). Addresses must be below
// 2^18: in a cluster a block's shared addresses have its rank in bits 24 and up, which must be
// masked away first.
namespace descriptor {
constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
constexpr std::uint64_t kStride1024 = std::uint64_t{1024 >> 4} << 32;
constexpr std::uint64_t kLeadingChunk = std::uint64_t{kChunkBytes >> 4} << 16;
constexpr std::uint64_t kLeadingUnused = std::uint64_t{1} << 16;
}  // namespace descriptor

// K-major operand of 64 rows at `chunk`: 8 rows every 1024 bytes (the leading offset is not used
// with this swizzle). Step k16 of the chunk (0 to 3) begins 32 * k16 bytes further: the hardware
// applies the swizzle to address bits, so a start inside a swizzled row is right.
__device__ __forceinline__ std::uint64_t descriptor_k_major(std::uint32_t chunk, int k16 = 0) {
  return descriptor::kSwizzle128 | descriptor::kStride1024 | descriptor::kLeadingUnused |
         static_cast<std::uint64_t>((chunk + 32 * k16) >> 4);
}

// MN-major operand that begins at `chunk`. Its M or N is spread over consecutive chunks, 64 columns
// in each (the leading offset is one chunk); 8 rows of K come every 1024 bytes. Step k16 begins at
// row 16 * k16.
__device__ __forceinline__ std::uint64_t descriptor_mn_major(std::uint32_t chunk, int k16 = 0) {
  return descriptor::kSwizzle128 | descriptor::kStride1024 | descriptor::kLeadingChunk |
         static_cast<std::uint64_t>((chunk + 2048 * k16) >> 4);
}

// The descriptor of the operand that begins `bytes` (a multiple of 16) after the described one.
// Kernels describe a base once and offset by constants: one addition for each operand.
__device__ __forceinline__ std::uint64_t descriptor_offset(std::uint64_t described,
                                                           std::uint32_t bytes) {
  return (described & 0xffffffff00000000ull) |
         (static_cast<std::uint32_t>(described) + (bytes >> 4));
}

// Address that this lane gives to stmatrix_x4 / ldmatrix_x4 to move the A fragment of step k16 (0
// to 3) of a chunk: rows 16 * warp to 16 * warp + 15, warp being the warp's number in its
// warpgroup.
__device__ __forceinline__ std::uint32_t fragment_address(std::uint32_t chunk, int warp, int lane,
                                                          int k16) {
  return chunk + chunk_offset(16 * warp + (lane & 15), 2 * k16 + (lane >> 4));
}

}  // namespace winnow::device
