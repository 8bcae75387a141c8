// What the attention kernels of the portable backend share: a block of eight warps multiplies tiles
// of 32 rows, for GPUs of compute capability 8.0 and newer.
//
// An item is 64 heads of a query. Its queries stay in registers: shared memory would hold them or
// rows, and the products would read them there for every tile. For the logits each warp has a part
// of the heads and of the columns of Q and K (72 registers), so that the logits come as kParts
// sums, which meet in shared memory: those of forward, decode and distribution as logits_cuda.cuh
// says, those of backward as the rows of a tile (multiply_scores()). kParts is 2, 16 heads of half
// of the columns, or 4, 32 heads of a quarter: then the warps read K half as often from shared
// memory, and the sums take twice the room.
//
// Heads beyond h_q are zeros: fewer than 64 cost as much as 64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm80/tile.cuh"

namespace winnow::sparse_mla::attention_cuda {

using namespace winnow::device;

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kHeads = 64;  // of an item
inline constexpr int kRows = 32;   // of a tile
inline constexpr int kValueColumns = 512;
inline constexpr int kWarpColumns = kValueColumns / kWarps;  // of the output
static_assert(kWarpColumns == 64 && kHeads == 8 * kWarps && kThreads == 8 * kRows);

inline constexpr float kLazy = 8.0f;
// The reference of a row before its first logit: below all that count, and finite.
inline constexpr float kNoReference = -1e30f;

// The sums of a row of logits: 32 f32, as many bytes as 64 columns of a tile. P takes the first
// half of a row of the first part.
using Sums = Tile<kHeads, 64>;

template <int kDim, int kParts, int kSlots>
struct Memory {
  Tile<kRows, kDim> rows[kSlots];
  Sums sums[kParts];
  float factors[kHeads];  // of a tile, where a reference was raised
  float ends[kHeads];     // of the item
  // What bounds the item's entries. It is read once, so that whatever is written to it meanwhile,
  // all warps go by the same tiles.
  std::int32_t limits[4];
};

// kType: f16 or bf16. kParts, of the columns of Q and K: 2 or 4.
template <DType kType_, int kDim_, int kParts_, int kSlots = 2>
struct Plan : Shared<Memory<kDim_, kParts_, kSlots>> {
  using Memory = attention_cuda::Memory<kDim_, kParts_, kSlots>;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(sums)
  WINNOW_PLACE(factors)
  WINNOW_PLACE(ends)
  WINNOW_PLACE(limits)

  static constexpr DType kType = kType_;
  static constexpr int kDim = kDim_, kParts = kParts_;
  static constexpr int kBytes = sizeof(Memory);
  static constexpr int kSteps = kDim / 16 / kParts;              // of 16 columns, of a warp
  static constexpr int kBlocks = kHeads / 16 * kParts / kWarps;  // of 16 heads, of a warp
  static_assert(4 % kParts == 0 && kSteps * kParts * 16 == kDim);
};

// A warp's part of the queries, as fragments. Step s of part p is the columns from
// 16 (kParts s + p) on.
template <class P>
using Queries = std::uint32_t[P::kBlocks][P::kSteps][4];

template <class P>
__device__ __forceinline__ int first_head(int warp) {
  return warp / P::kParts * 16 * P::kBlocks;
}

// Loads the queries. `heads` is where the item's first head begins, `count` (up to 64) those that
// exist; stride counts bytes.
template <class P, int kSteps>
__device__ __forceinline__ void load_queries(const char* heads, std::int64_t stride, int count,
                                             int warp, int lane,
                                             std::uint32_t (&q)[P::kBlocks][kSteps][4]) {
  const char* const first = heads + (warp % P::kParts * 16 + lane % 4 * 2) * 2;
#pragma unroll
  for (int m = 0; m < P::kBlocks; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first_head<P>(warp) + 16 * m + lane / 4 + 8 * r;
      const char* const from = first + (head < count ? head : 0) * stride;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const auto* const at =
              reinterpret_cast<const std::uint32_t*>(from + (16 * P::kParts * s + 8 * c) * 2);
          q[m][s][r + 2 * c] = head < count ? __ldg(at) : 0u;
        }
      }
    }
  }
}

// The address as it is, in one register of the lane. ptxas 13.0 keeps the part that all lanes share
// in a uniform register, and then writes copies that no GPU executes (check_descriptors.cmake).
__device__ __forceinline__ std::uint32_t in_one_register(std::uint32_t address, int lane) {
  return __shfl_sync(kFullWarp, address, lane);
}

// A warp copies four rows of a tile, eight lanes each.
__device__ __forceinline__ int copied_row(int warp, int lane) { return 4 * warp + lane / 8; }

// Copies the lane's row to a slot, 64 columns of it at each call. A row that is not visible becomes
// zeros, and is not read.
template <int kDim>
class RowCopy {
 public:
  static constexpr int kChunks = kDim / 64;

  __device__ __forceinline__ RowCopy(Place<Tile<kRows, kDim>> slot, const char* row, bool visible,
                                     int warp, int lane)
      : from_(forget(row + lane % 8 * kUnitBytes)),
        to_(in_one_register(slot.unit(copied_row(warp, lane), lane % 8), lane)),
        visible_(visible) {}

  __device__ __forceinline__ void operator()(int chunk) const {
    if (chunk >= kChunks) return;
    cp_async_zfill(to_ + chunk * Tile<kRows, kDim>::kChunkBytes, from_ + chunk * kTileLine,
                   visible_);
  }

 private:
  const char* from_;
  std::uint32_t to_;
  bool visible_;
};

struct NoCopy {
  static constexpr int kChunks = 0;
  __device__ __forceinline__ void operator()(int) const {}
};

// All of it.
template <class Copy>
__device__ __forceinline__ void copy_all(const Copy& copy) {
#pragma unroll
  for (int chunk = 0; chunk < Copy::kChunks; ++chunk) copy(chunk);
}

// Starts the copies of a tile to a slot. Lane l has entry l of the tile; row_of(entry) is where the
// row of a visible one begins, `mask` says which are.
template <class P, class RowOf>
__device__ __forceinline__ void copy_rows(Place<Tile<kRows, P::kDim>> slot, std::int32_t entry,
                                          std::uint32_t mask, int warp, int lane,
                                          std::uint64_t /*policy*/, const RowOf& row_of) {
  const int row = copied_row(warp, lane);
  const bool visible = mask >> row & 1;
  const std::int32_t mine = __shfl_sync(kFullWarp, entry, row);
  copy_all(RowCopy<P::kDim>(slot, row_of(visible ? mine : 0), visible, warp, lane));
}

// The warp's part of the logits of 16 rows: s[m][n] are 16 heads and 8 rows. `k`: the rows of the
// tile as operands b, from the first column of the part on. `q` may have fewer columns than K.
// beside(step) is done among the products.
template <class P, int kSteps, class Beside>
__device__ __forceinline__ void multiply_part(Squares<Tile<kRows, P::kDim>::kChunkBytes> k,
                                              int half,
                                              const std::uint32_t (&q)[P::kBlocks][kSteps][4],
                                              float (&s)[P::kBlocks][2][4], const Beside& beside) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t b[4];
    ldmatrix_x4(k.at(half, P::kParts * step), b[0], b[1], b[2], b[3]);
    beside(step);
#pragma unroll
    for (int m = 0; m < P::kBlocks; ++m) {
      mma_m16n8k16<P::kType>(s[m][0], q[m][step], b[0], b[1]);
      mma_m16n8k16<P::kType>(s[m][1], q[m][step], b[2], b[3]);
    }
  }
}

// The rows of a slot as multiply_part() takes them.
template <class P>
__device__ __forceinline__ Squares<Tile<kRows, P::kDim>::kChunkBytes> squares_of_part(P shared,
                                                                                      int slot,
                                                                                      int warp,
                                                                                      int lane) {
  auto k = shared.rows()[slot].squares_of_b(lane);
  k.lane ^= warp % P::kParts * 2 * kUnitBytes;
  return k;
}

// The warp's part of the logits of a tile, to shared memory.
template <class P, int kSteps>
__device__ __forceinline__ void multiply_scores(P shared, int slot, int warp, int lane,
                                                const std::uint32_t (&q)[P::kBlocks][kSteps][4]) {
  const auto k = squares_of_part(shared, slot, warp, lane);
  const auto sums = shared.sums()[warp % P::kParts];
#pragma unroll
  for (int half = 0; half < kRows / 16; ++half) {
    float s[P::kBlocks][2][4] = {};
    multiply_part<P>(k, half, q, s, [](int) {});
#pragma unroll
    for (int m = 0; m < P::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // 2 f32 take the place of 4 elements of the tile
          const int head = first_head<P>(warp) + 16 * m + lane / 4 + 8 * r;
          const std::uint64_t high = __float_as_uint(s[m][n][2 * r + 1]);
          st_shared(sums.pair(head, 32 * half + 16 * n + lane % 4 * 4),
                    high << 32 | __float_as_uint(s[m][n][2 * r]));
        }
      }
    }
  }
}

// The units of 4 logits of a row that a lane has: two rows of one warp load from different banks.
__device__ __forceinline__ int logit_unit(int lane, int i) {
  return lane % 4 + 4 * ((lane / 4 + i) & 1);
}

// The lane's 8 logits of its row, without the scale: x[i][e] is that of entry
// 4 * logit_unit(lane, i) + e.
template <class P>
__device__ __forceinline__ void load_logits(P shared, int warp, int lane, float (&x)[2][4]) {
  const int row = 8 * warp + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
      const uint4 words = ld_shared_words(shared.sums()[part].unit(row, logit_unit(lane, i)));
      const float sums[4] = {__uint_as_float(words.x), __uint_as_float(words.y),
                             __uint_as_float(words.z), __uint_as_float(words.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = part == 0 ? sums[e] : x[i][e] + sums[e];
    }
  }
}

// Whether the entry of x[i][e] is visible.
__device__ __forceinline__ bool sees(std::uint32_t mask, int lane, int i, int e) {
  return mask >> (4 * logit_unit(lane, i) + e) & 1;
}

}  // namespace winnow::sparse_mla::attention_cuda
