// Tensor maps, which describe a tensor in global memory and the boxes that the tensor memory
// accelerator copies from it: what cuTensorMapEncodeTiled is told, kept as it is, and the copy of a
// box (PTX: "Tensors", cp.async.bulk.tensor; the limits are those of the driver's document).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace winnow::simulator {

// With the driver's numbers (CUtensorMapDataType and its kin).
enum class TensorElement : std::uint8_t {
  u8,
  u16,
  u32,
  i32,
  u64,
  i64,
  f16,
  f32,
  f64,
  bf16,
  f32_ftz,
  tf32,
  tf32_ftz
};
enum class TensorInterleave : std::uint8_t { none, bytes16, bytes32 };
enum class TensorSwizzle : std::uint8_t { none, bytes32, bytes64, bytes128 };
enum class TensorFill : std::uint8_t { zeros, nan };

inline constexpr int kMaxTensorRank = 5;

// What the encoding takes; arrays have one entry for each dimension, strides one less.
struct TensorDescription {
  TensorElement element;
  const void* address;                     // in global memory
  std::span<const std::uint64_t> size;     // elements of the tensor
  std::span<const std::uint64_t> strides;  // bytes, of dimension 1 and up
  std::span<const std::uint32_t> box;      // elements that a box reaches over
  std::span<const std::uint32_t> steps;    // every steps[i]-th of them is copied; all of [0]
  TensorInterleave interleave;
  TensorSwizzle swizzle;
  TensorFill fill;  // of what lies outside of the tensor
};

// Stands for CUtensorMap: 128 opaque bytes, aligned to 64.
struct alignas(64) TensorMap {
  std::uint32_t valid;  // kValid once encoded
  std::uint8_t rank;
  TensorElement element;
  TensorInterleave interleave;
  TensorSwizzle swizzle;
  TensorFill fill;
  std::array<std::uint8_t, kMaxTensorRank> steps;
  std::array<std::uint16_t, kMaxTensorRank> box;
  const std::byte* address;
  std::array<std::uint64_t, kMaxTensorRank> size;
  std::array<std::uint64_t, kMaxTensorRank> strides;  // bytes; [0] is that of an element

  static constexpr std::uint32_t kValid = 0x7e4502a9;
};
static_assert(sizeof(TensorMap) == 128);

// Throws Misuse "tensor map", with the reason, where the driver would return only an error code.
TensorMap encode_tensor_map(const TensorDescription& description);

// Bytes that the copy of a box reports to its barrier: of all its elements, inside of the tensor or
// not. Throws Misuse "tensor copy" unless the map was encoded.
std::uint32_t box_bytes(const TensorMap& map);

// 16 bytes of a box: zeros, except `bytes` bytes at offset `skip`, which come from `global`.
struct BoxUnit {
  std::uint32_t shared;
  int skip, bytes;
  const std::byte* global;

  // Writes the 16 bytes.
  void write(std::byte* to) const;
};

// The units of the box that begins at `coordinates` (elements, dimension 0 first), for a copy to
// shared memory at `destination`: rows of dimension 0 one after the other, the swizzle applied to
// the address. Throws Misuse "tensor copy" for coordinates of another rank, a box whose first
// column is not at a multiple of 16 bytes, a destination that is not a multiple of 128, a map that
// was not encoded, and what this simulator does not model (interleaved layouts, NaN as fill,
// elements that the copy rounds or flushes, rows narrower than the swizzle). The PTX document has
// no rule for the first column, but an H200 reports an illegal instruction, whatever the type and
// the swizzle.
std::vector<BoxUnit> box_units(const TensorMap& map, std::span<const std::int32_t> coordinates,
                               std::uint32_t destination);

// The units of tile::gather4: four boxes of one row each, of a tensor of rank 2, from column
// coordinates[0] of the rows coordinates[1] to coordinates[4], one after the other. Rows outside of
// the tensor become zeros.
std::vector<BoxUnit> gather4_units(const TensorMap& map,
                                   std::span<const std::int32_t, 5> coordinates,
                                   std::uint32_t destination);

}  // namespace winnow::simulator
