// Tiles of 16-bit elements in shared memory, and where ldmatrix finds the fragments of
// mma.m16n8k16 (mma.cuh) in them. Plain arithmetic, for kernels of sm_80 and newer.
//
// A tile is stored by chunks of 64 columns: all rows of a chunk, 128 bytes each, then the next
// chunk. The 16-byte unit u (0 to 7) of row r of a chunk stands at u ^ (r & 7), so that the units
// of 8 rows that ldmatrix reads at once lie in different banks, as do those of a row.
//
// A square is 16 rows and 16 columns of a tile, two units wide. What ldmatrix_x4() and
// ldmatrix_x4_trans() load of it with the addresses of Squares, in their registers r0 to r3:
//
//   operand of the product    the square has       load    fragments
//   a, 16 of M and 16 of K    rows M, columns K            a = {r0, r1, r2, r3}
//   a                         rows K, columns M    trans   a = {r0, r2, r1, r3}
//   b, 16 of N and 16 of K    rows N, columns K            {r0, r2} of the first 8 of N, {r1, r3}
//                             with squares_of_b()          {r0, r1} of the first 8 of N, {r2, r3}
//   b                         rows K, columns N    trans   {r0, r1} of the first 8 of N, {r2, r3}
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/places.cuh"

namespace winnow::device {

inline constexpr int kUnitBytes = 16;   // 8 elements, what cp.async and ldmatrix move
inline constexpr int kChunkUnits = 8;   // of a row of a chunk
inline constexpr int kTileLine = 128;   // bytes of a row of a chunk
inline constexpr int kSquareRows = 16;  // and columns

// A tile as a member of the struct that lays out a kernel's shared memory.
template <int kRows_, int kColumns_>
struct alignas(kTileLine) Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static_assert(kRows % 8 == 0 && kColumns % 64 == 0);
  static constexpr int kUnits = kColumns / 8, kChunkBytes = kRows * kTileLine;
  std::byte bytes[kRows * kColumns * 2];
};

// Byte offset in a tile with such chunks of the unit `unit` of `row`.
template <int kChunkBytes>
__host__ __device__ constexpr std::uint32_t tile_offset(int row, int unit) {
  return static_cast<std::uint32_t>(unit / kChunkUnits * kChunkBytes + row * kTileLine +
                                    ((unit % kChunkUnits ^ (row & 7)) * kUnitBytes));
}

// The squares of a tile, as one lane sees them.
template <int kChunkBytes>
struct Squares {
  std::uint32_t lane;  // the address that it gives ldmatrix for the first one

  // For the square of rows from 16 * row16 on and columns from 16 * column16 on. With constants it
  // is one instruction, or none.
  __device__ std::uint32_t at(int row16, int column16) const {
    return (lane ^ column16 % 4 * 2 * kUnitBytes) + column16 / 4 * kChunkBytes +
           row16 * kSquareRows * kTileLine;
  }
};

template <int kRows, int kColumns>
struct Place<Tile<kRows, kColumns>> {
  using Type = Tile<kRows, kColumns>;
  std::uint32_t address;

  // Of 8 elements: columns 8 * unit to 8 * unit + 7 of the row.
  __device__ std::uint32_t unit(int row, int unit) const {
    return address + tile_offset<Type::kChunkBytes>(row, unit);
  }
  // Of the elements from an even column on, as an accumulator has them.
  __device__ std::uint32_t pair(int row, int column) const {
    return unit(row, column / 8) + column % 8 * 2;
  }
  __device__ Squares<Type::kChunkBytes> squares(int lane) const {
    return {unit(lane % kSquareRows, lane / kSquareRows)};
  }
  // For an operand b with rows N: its fragments come in neighbouring registers, as the product
  // takes them, where those of squares() have to be moved.
  __device__ Squares<Type::kChunkBytes> squares_of_b(int lane) const {
    return {unit(lane % 8 + lane / 16 * 8, lane / 8 % 2)};
  }
};

// Two f32 rounded to nearest even to 16 bits each, `low` in the lower half. kType is f16 or bf16.
template <DType kType>
__device__ std::uint32_t pack_pair(float low, float high) {
  static_assert(kType == DType::f16 || kType == DType::bf16);
  if constexpr (kType == DType::f16) {
    return pack_f16(low, high);
  } else {
    return pack_bf16(low, high);
  }
}
// The two elements of a word as f32, the lower half first.
template <DType kType>
__device__ float2 unpack_pair(std::uint32_t packed) {
  static_assert(kType == DType::f16 || kType == DType::bf16);
  if constexpr (kType == DType::f16) {
    return unpack_f16(packed);
  } else {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  }
}

}  // namespace winnow::device
