// What the sparse MLA kernels of sm90 share: which rows a query sees, and how a warpgroup copies 64
// of them at a time into the swizzled chunks that wgmma reads (device/sm90/wgmma.cuh).
//
// A tile is 64 consecutive entries of a query's index row. Entries past the query's length, outside
// [0, s_kv) or hidden by the causal limit are invalid: their rows are filled with zeros, nothing is
// read for them, and their bit in the tile's mask is 0.
//
// Kernels for dense problems, in which a query has a range of rows and no list, compute the entries
// instead of loading them, and are the same otherwise.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/sparse_mla/entries.cuh"

namespace winnow::sparse_mla {

inline constexpr int kTileRows = 64;
inline constexpr int kGatherThreads = 128;
inline constexpr int kGatherPasses = 4;  // 8 lanes copy a row's 128 bytes, so 16 rows a pass

__device__ __forceinline__ int tile_count(int entries) {
  return device::ceil_div(entries, kTileRows);
}

// The entries `lane` and `lane + 32` of a tile; each warp holds the whole tile.
struct TileEntries {
  std::int32_t low, high;
};

// Entries that are rows: entry j is row first + j, or absent below `begin`.
struct RowEntries {
  int first, begin;
};

// The entries of a tile of a dense problem, like load_tile() for a list. tile_mask() hides those
// from the range's end on.
__device__ __forceinline__ TileEntries load_tile(const RowEntries& rows, int tile, int, int lane) {
  const int row = rows.first + tile * kTileRows + lane;
  return {row < rows.begin ? -1 : row, row + 32 < rows.begin ? -1 : row + 32};
}

// Loads the entries of tile `tile` of an index row of which `entries` count. Never reads past them.
__device__ __forceinline__ TileEntries load_tile(const std::int32_t* row, int tile, int entries,
                                                 int lane) {
  const int first = tile * kTileRows + lane;
  TileEntries loaded{-1, -1};
  if (first < entries) loaded.low = __ldg(row + first);
  if (first + 32 < entries) loaded.high = __ldg(row + first + 32);
  return loaded;
}

// Bit r of the result: entry r of the tile is valid. The whole warp must call.
__device__ __forceinline__ std::uint64_t tile_mask(const TileEntries& entries,
                                                   std::uint32_t visible) {
  const std::uint32_t low =
      __ballot_sync(0xffffffffu, static_cast<std::uint32_t>(entries.low) < visible);
  const std::uint32_t high =
      __ballot_sync(0xffffffffu, static_cast<std::uint32_t>(entries.high) < visible);
  return static_cast<std::uint64_t>(high) << 32 | low;
}

// The four rows that a thread copies, one a pass: row 16 * pass + thread / 8 of the tile, of which
// it takes the 16-byte column thread % 8 of each chunk.
struct GatherRows {
  const char* source[kGatherPasses];
  std::uint32_t valid;  // bit `pass`
};

// The rows that a thread copies of a tile. `thread` is its number in the gather warpgroup;
// row_of(entry) is where the row of a valid entry begins (or of entry 0, of which nothing is read).
template <class RowOf>
__device__ __forceinline__ GatherRows gather_rows(const TileEntries& entries, std::uint64_t mask,
                                                  int thread, const RowOf& row_of) {
  GatherRows rows;
  rows.valid = 0;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int row = 16 * pass + thread / 8;
    // Row `row` is held by lane row % 32: passes 0 and 1 are the low half, 2 and 3 the high one.
    const std::int32_t entry =
        __shfl_sync(0xffffffffu, pass < 2 ? entries.low : entries.high, row & 31);
    const bool valid = mask >> row & 1;
    // An entry is used only after the mask has vouched for it.
    rows.source[pass] = row_of(valid ? entry : 0) + (thread & 7) * 16;
    rows.valid |= static_cast<std::uint32_t>(valid) << pass;
  }
  return rows;
}

// The same of a problem's cache.
__device__ __forceinline__ GatherRows gather_rows(const GatherView& view,
                                                  const TileEntries& entries, std::uint64_t mask,
                                                  int thread) {
  return gather_rows(entries, mask, thread,
                     [&](std::int64_t entry) { return view.kv + entry * view.kv_stride; });
}

// 64 heads of a query from `first_head` on, in the shape of a tile. `heads` is where the query's
// heads begin, `stride` counts bytes. Those for which valid(pass, head) is false become zeros, and
// are not read; `pass` is the pass in which the calling thread copies the head.
template <class Valid>
__device__ __forceinline__ GatherRows head_rows(const char* heads, std::int64_t stride,
                                                int first_head, int thread, const Valid& valid) {
  GatherRows rows;
  rows.valid = 0;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int head = first_head + 16 * pass + thread / 8;
    const bool counts = valid(pass, head);
    rows.source[pass] = heads + (counts ? head : 0) * stride + (thread & 7) * 16;
    rows.valid |= static_cast<std::uint32_t>(counts) << pass;
  }
  return rows;
}

// Starts the copies of chunk `chunk` (columns 64 * chunk to 64 * chunk + 63) of the rows to
// `destination`. Invalid rows become zeros. L2 fetches kFetched bytes at a time.
template <int kFetched = 256>
__device__ __forceinline__ void gather_chunk(std::uint32_t destination, const GatherRows& rows,
                                             int chunk, int thread, std::uint64_t policy) {
  // 16 rows further the swizzle is the same: one offset serves the four passes.
  const std::uint32_t to = destination + device::chunk_offset(thread / 8, thread & 7);
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    device::cp_async_zfill<kFetched>(to + pass * 16 * 128, rows.source[pass] + chunk * 128,
                                     rows.valid >> pass & 1, policy);
  }
}

}  // namespace winnow::sparse_mla
