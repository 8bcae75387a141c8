// The formats of a paged cache of latent rows: bf16, or f8_e4m3 in one of three layouts.
// Offsets count bytes; the functions are for host and device.
#pragma once

#include <cstdint>
#include <string_view>

#include "winnow/core/export.h"

#ifdef __CUDACC__
#define WINNOW_CACHE_FORMAT __host__ __device__
#else
#define WINNOW_CACHE_FORMAT
#endif

namespace winnow::sparse_mla {

// A cache is [blocks, block_size, 1, row]. The layouts in f8 with scales are those of FlashMLA.
enum class CacheFormat : std::uint8_t {
  // u8 or f8_e4m3 [blocks, block_size, 1, 656], DeepSeek-V3.2: a row is 512 f8_e4m3, 4 scales in
  // f32 for 128 values each, 64 bf16 (RoPE). It stands for 576 columns. Readers take any scale.
  fp8_656,
  // u8 or f8_e4m3 [blocks, block_size, 1, 584], DeepSeek-V4: the shape is nominal. In each block
  // come first the rows, 448 f8_e4m3 and 64 bf16 (RoPE) in 576 bytes each, and then 8 bytes for
  // each row: 7 scales in ue8m0 for 64 values each, and a byte of padding. A row stands for 512
  // columns.
  fp8_584,
  // bf16 [blocks, block_size, 1, 576 or 512]: plain columns.
  bf16,
  // u8 or f8_e4m3 [blocks, block_size, 1, 576]: plain columns. decode() takes one scale of them
  // all.
  fp8_576,
};

constexpr std::string_view to_string(CacheFormat format) {
  switch (format) {
    case CacheFormat::fp8_656:
      return "fp8_656";
    case CacheFormat::fp8_584:
      return "fp8_584";
    case CacheFormat::bf16:
      return "bf16";
    case CacheFormat::fp8_576:
      return "fp8_576";
  }
  return "unknown";
}

// Throws Error naming the known formats.
WINNOW_EXPORT CacheFormat cache_format_from_string(std::string_view name);

// A row of fp8_656, at its block + offset * (stride between rows).
struct Row656 {
  static constexpr std::int64_t kQuantised = 512, kGroup = 128, kGroups = 4, kRope = 64;
  static constexpr std::int64_t kColumns = kQuantised + kRope;
  static constexpr std::int64_t kScaleOffset = kQuantised;
  static constexpr std::int64_t kRopeOffset = kScaleOffset + 4 * kGroups;
  static constexpr std::int64_t kBytes = kRopeOffset + 2 * kRope;
};
static_assert(Row656::kColumns == 576 && Row656::kRopeOffset == 528 && Row656::kBytes == 656);

// A row of fp8_584.
struct Row584 {
  static constexpr std::int64_t kQuantised = 448, kGroup = 64, kGroups = 7, kRope = 64;
  static constexpr std::int64_t kColumns = kQuantised + kRope;
  static constexpr std::int64_t kRopeOffset = kQuantised;
  static constexpr std::int64_t kRowBytes = kRopeOffset + 2 * kRope;
  static constexpr std::int64_t kScaleBytes = kGroups + 1;
  static constexpr std::int64_t kBytes = kRowBytes + kScaleBytes;  // the nominal last dimension
  static constexpr std::int64_t kBlockMultiple = 576;

  // From the begin of the block to the row, and to its scales.
  WINNOW_CACHE_FORMAT static constexpr std::int64_t row_offset(std::int64_t offset) {
    return offset * kRowBytes;
  }
  WINNOW_CACHE_FORMAT static constexpr std::int64_t scale_offset(std::int64_t block_size,
                                                                 std::int64_t offset) {
    return block_size * kRowBytes + offset * kScaleBytes;
  }
  // The least stride between blocks.
  WINNOW_CACHE_FORMAT static constexpr std::int64_t block_bytes(std::int64_t block_size) {
    return (block_size * kBytes + kBlockMultiple - 1) / kBlockMultiple * kBlockMultiple;
  }
};
static_assert(Row584::kColumns == 512 && Row584::kRowBytes == 576 && Row584::kBytes == 584);

// A row of fp8_576.
struct Row576 {
  static constexpr std::int64_t kColumns = 576, kRope = 64;
  static constexpr std::int64_t kRopeOffset = kColumns - kRope, kBytes = kColumns;
};

// The scale of a group of quantised values whose largest magnitude is `amax`, which is a bf16:
// 2^ceil(log2(max(amax, 1e-4) / 448)). Values are stored as f8_e4m3(value / scale), rounded to
// nearest even and saturating, and mean bf16(f8 * scale), where the product is rounded to f32 first
// (it is exact for scales that are powers of two). If a group contains a NaN or an infinity, all
// its values and its scale are NaN: 0x7f, the f32 0x7fc00000 and the ue8m0 0xff.
WINNOW_CACHE_FORMAT constexpr float cache_scale(float amax) {
  constexpr float kLeastAmax = 1e-4f, kLargestF8 = 448.0f;
  constexpr std::uint32_t kMantissa = 0x007fffffu, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  if ((__builtin_bit_cast(std::uint32_t, amax) & 0x7fffffffu) >= kInfinity) {
    return __builtin_bit_cast(float, kNan);
  }
  const float least = (amax > kLeastAmax ? amax : kLeastAmax) / kLargestF8;
  // Up to the next exponent, unless it is a power of two.
  return __builtin_bit_cast(float,
                            (__builtin_bit_cast(std::uint32_t, least) + kMantissa) & ~kMantissa);
}

// The scale that a byte of ue8m0 stands for: 2^(bits - 127), 0xff for NaN.
WINNOW_CACHE_FORMAT constexpr float ue8m0_to_f32(std::uint8_t bits) {
  const std::uint32_t least = 0x00400000u, nan = 0x7fc00000u;  // 2^-127 is subnormal
  const std::uint32_t shifted = static_cast<std::uint32_t>(bits) << 23;
  return __builtin_bit_cast(float, bits == 0 ? least : bits == 0xff ? nan : shifted);
}

// The byte of a scale that cache_scale() gave.
WINNOW_CACHE_FORMAT constexpr std::uint8_t scale_to_ue8m0(float scale) {
  return static_cast<std::uint8_t>(__builtin_bit_cast(std::uint32_t, scale) >> 23);
}

}  // namespace winnow::sparse_mla

#undef WINNOW_CACHE_FORMAT
