// What the attention kernels of the portable backend share: a block of eight warps multiplies tiles
// of 32 rows, for GPUs of compute capability 8.0 and newer. Where decode has few heads, a block has
// four warps, and 32 heads.
//
// An item is 64 heads of a query. Its queries stay in registers: shared memory would hold them or
// rows, and the products would read them there for every tile. For the logits each warp has a part
// of the heads and of the columns of Q and K (72 registers), so that the logits come as kParts
// sums, which meet in shared memory: those of forward, decode and distribution as logits_cuda.cuh
// says. kParts is 2, 16 heads of half of the columns, or 4, 32 heads of a quarter: then the warps
// read K half as often from shared memory, and the sums take twice the room. backward has parts of
// its own.
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

// Copies a row of a tile to a slot, 64 columns of it at each call; eight lanes copy a row. One that
// is not visible becomes zeros, and is not read.
template <int kDim>
class RowCopy {
 public:
  static constexpr int kChunks = kDim / 64;

  // Row `to` of the slot; `row` is where it begins in memory.
  __device__ __forceinline__ RowCopy(Place<Tile<kRows, kDim>> slot, int to, const char* row,
                                     bool visible, int lane)
      : from_(forget(row + lane % 8 * kUnitBytes)),
        to_(in_one_register(slot.unit(to, lane % 8), lane)),
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

// All of it.
template <class Copy>
__device__ __forceinline__ void copy_all(const Copy& copy) {
#pragma unroll
  for (int chunk = 0; chunk < Copy::kChunks; ++chunk) copy(chunk);
}

// What nothing is left to copy of.
struct NoCopy {
  static constexpr int kChunks = 0;
  __device__ __forceinline__ void operator()(int) const {}
};

// Begins to copy the lane's rows of a tile, each as copy_of(row) says. Of eight warps each has four
// rows, and what is returned copies the lane's among products; four warps copy theirs at once.
template <class P, class CopyOf>
__device__ __forceinline__ auto copies_of(int warp, int lane, const CopyOf& copy_of) {
  const int row = 4 * warp + lane / 8;
  if constexpr (P::kWarps == 8) {
    return copy_of(row);
  } else {
    static_assert(8 * P::kWarps == kRows);
    const auto first = copy_of(row), second = copy_of(row + kRows / 2);
    copy_all(first);
    copy_all(second);
    return NoCopy();
  }
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

}  // namespace winnow::sparse_mla::attention_cuda
