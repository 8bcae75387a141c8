// What the attention kernels of the portable backend share (forward, decode): a block of eight
// warps multiplies tiles of 32 rows, for GPUs of compute capability 8.0 and newer.
//
// An item is 64 heads of a query. Its output, 64 x 512 f32, fills half of the register file: each
// warp has 64 columns of it for all heads, 128 registers a thread. Its queries stay in registers,
// too: shared memory would hold them or rows, and the products would read them there for every
// tile. For the logits each warp has a part of the heads and of the columns of Q and K (72
// registers), so that the logits come as kParts sums, which meet in shared memory. The sums,
// P = exp(logit - reference) and the references of a row are the business of four lanes of one
// warp, which has eight rows.
//
//   all warps     Q K^T of a part of the columns   to shared memory
//   each warp     8 heads: sums, softmax           P to shared memory, in the place of the first
//   sums all warps     P V                              for 64 of the 512 columns
//
// with a barrier behind each line. While a tile is multiplied the rows of the next one are copied
// to the other of two slots.
//
// Shared memory:                          d_qk 576    d_qk 512    of the slots 72 or 64 KiB
//   kParts = 2: 16 heads of 1/2            89 KiB      81 KiB
//   kParts = 4: 32 heads of 1/4           105 KiB      97 KiB
// A block has 99 KiB on the GPUs that have the least (compute capability 8.6, 8.9, 12.0). With four
// parts the warps read K half as often from shared memory, which is what bounds the products:
//   in 32 B-times of the multiprocessor for a tile, at 576 columns: products 2176; reads of K 1152
//   with two parts and 576 with four, sums 256 and 512, P and V 512, copies 288.
//
// Heads beyond h_q are zeros: fewer than 64 cost as much as 64.
//
// The softmax is online, in base 2, with the references of attention_sm90.cuh: raised only when a
// logit exceeds one by kLazy, so that the output is rescaled about once an item.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/places.cuh"
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

// The warp's columns of the output: o[m][n] are 16 heads and 8 columns.
using Output = float[kHeads / 16][kWarpColumns / 8][4];

// What a lane knows of its row: head 8 * warp + lane / 4.
struct RowState {
  float reference = kNoReference;   // in base 2, the same in the lanes of the row
  float sum = 0;                    // of P over the columns of this lane, relative to it
  float top = negative_infinity();  // the row's largest logit, in base 2
};

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

// Starts the copies of a tile to a slot: each warp those of four rows. Lane l has entry l of the
// tile; row_of(entry) is where the row of a visible one begins, `mask` says which are. Others
// become zeros, and are not read.
template <class P, class RowOf>
__device__ __forceinline__ void copy_rows(Place<Tile<kRows, P::kDim>> slot, std::int32_t entry,
                                          std::uint32_t mask, int warp, int lane,
                                          std::uint64_t policy, const RowOf& row_of) {
  const int row = 4 * warp + lane / 8, unit = lane % 8;
  const bool visible = mask >> row & 1;
  const std::int32_t mine = __shfl_sync(kFullWarp, entry, row);
  const char* const from = row_of(visible ? mine : 0) + unit * kUnitBytes;
  const std::uint32_t to = in_one_register(slot.unit(row, unit), lane);
#pragma unroll
  for (int chunk = 0; chunk < P::kDim / 64; ++chunk) {
    cp_async_zfill<128>(to + chunk * Tile<kRows, P::kDim>::kChunkBytes, from + chunk * kTileLine,
                        visible, policy);
  }
}

// The warp's part of the logits of a tile, to shared memory. `q` may have fewer columns than K.
template <class P, int kSteps>
__device__ __forceinline__ void multiply_scores(P shared, int slot, int warp, int lane,
                                                const std::uint32_t (&q)[P::kBlocks][kSteps][4]) {
  const int part = warp % P::kParts;
  auto k = shared.rows()[slot].squares(lane);
  k.lane ^= part * 2 * kUnitBytes;
  const auto sums = shared.sums()[part];
#pragma unroll
  for (int half = 0; half < kRows / 16; ++half) {
    float s[P::kBlocks][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t b[4];
      ldmatrix_x4(k.at(half, P::kParts * step), b[0], b[2], b[1], b[3]);
#pragma unroll
      for (int m = 0; m < P::kBlocks; ++m) {
        mma_m16n8k16<P::kType>(s[m][0], q[m][step], b[0], b[1]);
        mma_m16n8k16<P::kType>(s[m][1], q[m][step], b[2], b[3]);
      }
    }
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

// Turns the logits of the warp's rows to P, in the place of the first part of their sums. Returns
// whether the reference of this lane's row was raised; `factors` says by how much.
template <class P>
__device__ __forceinline__ bool weigh(P shared, float scale, std::uint32_t mask, int warp, int lane,
                                      RowState& state) {
  float x[2][4];
  load_logits(shared, warp, lane, x);
  float top = negative_infinity();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (sees(mask, lane, i, e)) top = fmaxf(top, x[i][e] * scale);
    }
  }
  top = quad_max(top);
  state.top = fmaxf(state.top, top);
  const bool raised = top > state.reference + kLazy;
  const float reference = raised ? top : state.reference;
  const float factor = ex2(state.reference - reference);
  state.reference = reference;

  float sum = 0;
  __syncwarp();  // all lanes have their logits
  const int row = 8 * warp + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int unit = logit_unit(lane, i);
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Of large logits a product that is not rounded before the difference.
      p[e] = sees(mask, lane, i, e) ? ex2(fmaf(x[i][e], scale, -reference)) : 0.0f;
      sum += p[e];
    }
    const std::uint64_t high = pack_pair<P::kType>(p[2], p[3]);
    st_shared(shared.sums()[0].pair(row, 4 * unit), high << 32 | pack_pair<P::kType>(p[0], p[1]));
  }
  state.sum = state.sum * factor + sum;
  if (lane % 4 == 0) shared.factors()[row].store(factor);
  return raised;
}

// Brings the output to the references of this tile.
template <class P>
__device__ __forceinline__ void rescale(P shared, int lane, Output& o) {
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = shared.factors()[16 * m + lane / 4 + 8 * r].load();
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        o[m][n][2 * r] *= factor;
        o[m][n][2 * r + 1] *= factor;
      }
    }
  }
}

// o += P V of a tile.
template <class P>
__device__ __forceinline__ void multiply_values(P shared, int slot, int warp, int lane, Output& o) {
  const auto weights = shared.sums()[0].squares(lane);
  auto v = shared.rows()[slot].squares(lane);
  v.lane += warp * Tile<kRows, P::kDim>::kChunkBytes;  // the warp's 64 columns are a chunk
#pragma unroll
  for (int k16 = 0; k16 < kRows / 16; ++k16) {
    std::uint32_t p[kHeads / 16][4];
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
      ldmatrix_x4(weights.at(m, k16), p[m][0], p[m][1], p[m][2], p[m][3]);
    }
#pragma unroll
    for (int n16 = 0; n16 < kWarpColumns / 16; ++n16) {
      std::uint32_t b[4];
      ldmatrix_x4_trans(v.at(k16, n16), b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        mma_m16n8k16<P::kType>(o[m][2 * n16], p[m], b[0], b[1]);
        mma_m16n8k16<P::kType>(o[m][2 * n16 + 1], p[m], b[2], b[3]);
      }
    }
  }
}

// A tile whose rows are in a slot and whose turn it is: logits, softmax, values. The block's
// threads have passed a barrier since the rows came and since the tile before.
template <class P>
__device__ __forceinline__ void attend(P shared, int slot, float scale, std::uint32_t mask,
                                       int warp, int lane, const Queries<P>& q, RowState& state,
                                       Output& o) {
  multiply_scores(shared, slot, warp, lane, q);
  __syncthreads();  // the sums are there
  const bool raised = weigh(shared, scale, mask, warp, lane, state);
  if (__syncthreads_or(raised)) rescale(shared, lane, o);
  multiply_values(shared, slot, warp, lane, o);
}

// What the output of a row is multiplied by, with a sink in base 2.
__device__ __forceinline__ float output_factor(float sum, float reference, float sink) {
  // Nothing visible: the sum is 0 and the output too, whatever the sink.
  return sum == 0.0f || sink == infinity() ? 0.0f : 1.0f / (sum + ex2(sink - reference));
}

// Writes the output of the first `count` heads, each times its factor in `ends`. `heads` is where
// that of the first head begins, stride counts bytes.
template <class P>
__device__ __forceinline__ void store_output(P shared, char* heads, std::int64_t stride, int count,
                                             int warp, int lane, const Output& o) {
  // A quad holds 32 columns of a row as 4 blocks of 8, two columns a lane; transposed, each lane
  // has one block, 16 bytes.
  char* const to = heads + (warp * kWarpColumns + 8 * (lane & 3)) * 2;
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = 16 * m + lane / 4 + 8 * r;
      const float factor = shared.ends()[head].load();
#pragma unroll
      for (int part = 0; part < kWarpColumns / 32; ++part) {
        std::uint32_t w[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const auto& d = o[m][4 * part + b];
          w[b] = pack_pair<P::kType>(d[2 * r] * factor, d[2 * r + 1] * factor);
        }
        quad_transpose(w, lane);
        if (head < count) {
          store_streaming(to + head * stride + 64 * part, w[0], w[1], w[2], w[3]);
        }
      }
    }
  }
}

}  // namespace winnow::sparse_mla::attention_cuda
