// How forward and decode of the portable backend go through the tiles of an item. What they share
// with the other attention kernels is in attention_cuda.cuh.
//
// The output of an item, 64 x 512 f32, fills half of the register file: each warp has 64 columns of
// it for all heads, 128 registers a thread.
//
// A tile takes three turns:
//   all warps     Q K^T of a part of the columns   to shared memory, kParts sums
//   each warp     8 heads: sums, softmax           P to shared memory
//   all warps     P V                              for 64 of the 512 columns
//
// Pipelined, all three are on the way at a time, of three tiles, between two barriers of the block.
// Four warps share heads, and no other warp needs their sums. The first four do
//   softmax of the tile before, Q K^T of the tile, P V of the tile before that
// and the other four P V first, so that while one half waits for sums and exponentials the other
// multiplies. Rows of the next tile are copied among the products of Q K^T, to a fourth slot.
// Where a block has too little shared memory for that, the turns of a tile follow each other, with
// a barrier behind each.
//
// Shared memory of a block, d_qk 576 and 512: pipelined, in four parts, 188 and 172 KiB; otherwise,
// in two parts, 96 and 88 KiB, of the 99 KiB that GPUs have at least (compute capability 8.6, 8.9,
// 12.0).
//
// What a tile takes of the multiprocessor, in cycles at 576 columns: products 1740 (Hopper); of the
// 128 bytes of shared memory a cycle, reads of K 1152 with two parts and 576 with four, sums 256
// and 512, P 288, V 256, copies 288.
//
// Heads beyond h_q are zeros: fewer cost as much as all that a block has. Blocks of four warps,
// with 32 heads, are not pipelined: a multiprocessor has two of them instead, which do not wait for
// each other. Their warps have 128 columns of the output. Plans with as many parts form all sums of
// a head in the same order: rows in 16 bits give the same bits in all of them.
//
// The softmax is online, in base 2, with the references of attention_sm90.cuh: raised only when a
// logit exceeds one by kLazy, so that the output is rescaled about once an item.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/named_barrier.cuh"
#include "winnow/sparse_mla/logits_cuda.cuh"

namespace winnow::sparse_mla::attention_cuda {

// P of eight heads as matrices of 8 x 8, which lie as ldmatrix reads them; words of the lanes.
using Weights = std::uint32_t[kRows / 8][32];

template <int kHeads, int kDim, int kParts, int kSlots, int kTurns>
struct AttendMemory {
  Tile<kRows, kDim> rows[kSlots];
  Partials partials[kHeads / 8][kParts];
  Weights weights[kTurns][kHeads / 8];
  float factors[kTurns][kHeads];   // of a tile, where a reference was raised
  float ends[kHeads];              // of the item
  float states[3][4 * kHeads];     // RowState: registers are scarce
  std::int32_t entries[2][kRows];  // of the tile whose copies begin, and of the next one
  std::uint32_t masks[4];          // of tiles: which entries are visible
  std::int32_t bounds[8];          // of the item's entries
};

// kType: f16 or bf16. kParts, of the columns of Q and K: 2 or 4.
template <DType kType, int kDim, int kParts, bool kPipelined_, int kSlots_ = kPipelined_ ? 4 : 2,
          int kWarps = attention_cuda::kWarps>
struct AttendPlan : Parts<kType, kDim, kParts, kWarps>,
                    Shared<AttendMemory<8 * kWarps, kDim, kParts, kSlots_, kPipelined_ ? 2 : 1>> {
  using Memory = AttendMemory<8 * kWarps, kDim, kParts, kSlots_, kPipelined_ ? 2 : 1>;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(partials)
  WINNOW_PLACE(weights)
  WINNOW_PLACE(factors)
  WINNOW_PLACE(ends)
  WINNOW_PLACE(states)
  WINNOW_PLACE(entries)
  WINNOW_PLACE(masks)
  WINNOW_PLACE(bounds)

  __device__ explicit AttendPlan(std::uint32_t base) : Shared<Memory>{base} {}

  static constexpr bool kPipelined = kPipelined_;
  static constexpr int kSlots = kSlots_;
  static constexpr int kBytes = sizeof(Memory);
};

// The warp's columns of the output: o[m][n] are 16 heads and 8 columns.
template <class P>
using Output = float[P::kHeads / 16][P::kWarpColumns / 8][4];

// What a lane knows of its row: head 8 * warp + lane / 4.
struct RowState {
  float reference = kNoReference;   // in base 2, the same in the lanes of the row
  float sum = 0;                    // of P over the columns of this lane, relative to it
  float top = negative_infinity();  // the lane's largest logit, in base 2
};

template <class P>
__device__ __forceinline__ RowState load_state(P shared, int thread) {
  const auto states = shared.states();
  return {states[0][thread].load(), states[1][thread].load(), states[2][thread].load()};
}
template <class P>
__device__ __forceinline__ void store_state(P shared, int thread, const RowState& state) {
  const auto states = shared.states();
  states[0][thread].store(state.reference);
  states[1][thread].store(state.sum);
  states[2][thread].store(state.top);
}

// Where what a tile leaves for the next turn lies.
template <class P>
__device__ __forceinline__ int turn_of(int tile) {
  return P::kPipelined ? tile & 1 : 0;
}
template <class P>
__device__ __forceinline__ int slot_of(int tile) {
  static_assert((P::kSlots & (P::kSlots - 1)) == 0);
  return tile & (P::kSlots - 1);
}

// Turns the logits of the warp's heads to P. Returns whether a reference was raised; `factors` says
// by how much.
template <class P>
__device__ __forceinline__ bool weigh(P shared, int tile, float scale, int warp, int lane) {
  const int turn = turn_of<P>(tile), thread = 32 * warp + lane;
  RowState state = load_state(shared, thread);
  const std::uint32_t own = own_entries(shared.masks()[tile & 3].load(), lane);
  Logits x;
  take_logits<P::kParts>(shared.partials(), warp, lane, x);
  float top = negative_infinity();
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (sees(own, n, e)) top = fmaxf(top, x[n][e] * scale);
    }
  }
  state.top = fmaxf(state.top, top);
  // The lanes of a head compare what they have of it: shuffles take longer than a vote.
  const bool raised = __any_sync(kFullWarp, top > state.reference + kLazy);
  float factor = 1;
  if (raised) {
    top = quad_max(top);
    if (top > state.reference + kLazy) {
      factor = ex2(state.reference - top);
      state.reference = top;
    }
  }

  float sum = 0;
  const auto weights = shared.weights()[turn][warp][0][lane];
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
    float p[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Of large logits a product that is not rounded before the difference.
      p[e] = sees(own, n, e) ? ex2(fmaf(x[n][e], scale, -state.reference)) : 0.0f;
      sum += p[e];
    }
    (weights + 32 * n).store(pack_pair<P::kType>(p[0], p[1]));
  }
  state.sum = state.sum * factor + sum;
  store_state(shared, thread, state);
  if (lane % 4 == 0) shared.factors()[turn][8 * warp + lane / 4].store(factor);
  return raised;
}

// Brings the output to the references of a tile.
template <class P>
__device__ __forceinline__ void rescale(P shared, int tile, int lane, Output<P>& o) {
  const auto factors = shared.factors()[turn_of<P>(tile)];
#pragma unroll
  for (int m = 0; m < P::kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = factors[16 * m + lane / 4 + 8 * r].load();
#pragma unroll
      for (int n = 0; n < P::kWarpColumns / 8; ++n) {
        o[m][n][2 * r] *= factor;
        o[m][n][2 * r + 1] *= factor;
      }
    }
  }
}

// o += P V of a tile.
template <class P>
__device__ __forceinline__ void multiply_values(P shared, int tile, int warp, int lane,
                                                Output<P>& o) {
  // The four matrices of a fragment: the first and the second eight heads, then further entries.
  const auto weights = shared.weights()[turn_of<P>(tile)][lane / 8 % 2][lane / 16][lane % 8 * 4];
  constexpr int kMatrixWords = 32, kWarpWords = kRows / 8 * kMatrixWords;
  auto v = shared.rows()[slot_of<P>(tile)].squares(lane);
  v.lane += warp * (P::kWarpColumns / 64) * Tile<kRows, P::kDim>::kChunkBytes;
#pragma unroll
  for (int k16 = 0; k16 < kRows / 16; ++k16) {
    std::uint32_t p[P::kHeads / 16][4];
#pragma unroll
    for (int m = 0; m < P::kHeads / 16; ++m) {
      ldmatrix_x4((weights + (2 * m * kWarpWords + 2 * k16 * kMatrixWords)).address, p[m][0],
                  p[m][1], p[m][2], p[m][3]);
    }
#pragma unroll
    for (int n16 = 0; n16 < P::kWarpColumns / 16; ++n16) {
      std::uint32_t b[4];
      ldmatrix_x4_trans(v.at(k16, n16), b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int m = 0; m < P::kHeads / 16; ++m) {
        mma_m16n8k16<P::kType>(o[m][2 * n16], p[m], b[0], b[1]);
        mma_m16n8k16<P::kType>(o[m][2 * n16 + 1], p[m], b[2], b[3]);
      }
    }
  }
}

// Begins a tile whose entries are in shared memory: brings those of the tile behind it, and returns
// what copies the lane's rows chunk by chunk, which copy_of(row, entry, visible) makes. (Loaded to
// registers, entries would share a scoreboard with operands of products.) tiles.entry() is what an
// entry means.
template <class P, class Tiles, class CopyOf>
__device__ __forceinline__ auto start_tile(P shared, const Tiles& tiles, int tile, int warp,
                                           int lane, const CopyOf& copy_of) {
  const auto entries = shared.entries()[tile & 1];
  const auto entry_of = [&](int n) { return tiles.entry(tile, n, entries[n].load()); };
  if (warp == 0) {
    const std::uint32_t mask = __ballot_sync(kFullWarp, tiles.holds(tile, entry_of(lane)));
    if (lane == 0) shared.masks()[tile & 3].store(mask);
  }
  if (warp == 1) tiles.bring(tile + 1, lane, shared.entries()[(tile + 1) & 1][lane]);
  return copies_of<P>(warp, lane, [&](int row) {
    const std::int32_t entry = entry_of(row);
    return copy_of(row, entry, tiles.holds(tile, entry));
  });
}
// Before the first one.
template <class P, class Tiles>
__device__ __forceinline__ void bring_first_entries(P shared, const Tiles& tiles, int warp,
                                                    int lane) {
  if (warp == 0) tiles.bring(0, lane, shared.entries()[0][lane]);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // the first entries are there
}

// What follows from a thread's number, found anew where registers are scarce.
struct ThreadPlace {
  int warp, lane;
};
template <class P>
__device__ __forceinline__ ThreadPlace thread_anew(std::uint32_t thread) {
  const std::uint32_t here = forget(thread) % P::kThreads;
  return {static_cast<int>(here / 32), static_cast<int>(here % 32)};
}

// Attends to an item's tiles. advance(tile), when the rows of a tile are there, gives what copies
// those of the next one, chunk by chunk, among the products of Q K^T; that of -1 is done. What
// follows from the thread's number is found anew for each tile: registers are scarce.
template <class P, class Advance>
__device__ __forceinline__ void attend(P shared, int tiles, float scale, int thread,
                                       const Queries<P>& q, Output<P>& o, const Advance& advance) {
  const auto give = [&](int tile, int warp, int lane, const auto& copy) {
    give_logits<P>(shared, slot_of<P>(tile), shared.partials(), warp, lane, q, copy);
    cp_async_commit();  // of the next tile, and of entries
  };
  store_state(shared, thread, RowState{});
  if constexpr (P::kPipelined) {
    bool raised = false;
    for (int tile = 0; tile < tiles + 2; ++tile) {
      const ThreadPlace at = thread_anew<P>(thread);
      const int warp = at.warp, lane = at.lane;
      cp_async_wait<0>();  // what this thread copied of the tile is there
      // And all of it, the logits of the tile before, and P of the one before that.
      if (__syncthreads_or(raised)) rescale(shared, tile - 2, lane, o);
      raised = false;
      const bool is_second = warp >= P::kParts;
      if (is_second && tile >= 2) multiply_values(shared, tile - 2, warp, lane, o);
      if (0 < tile && tile <= tiles) raised = weigh(shared, tile - 1, scale, warp, lane);
      if (tile < tiles) {
        const auto copy = advance(tile, warp, lane);
        bar_sync<32 * P::kParts>(1 + warp / P::kParts);  // their logits may be replaced
        give(tile, warp, lane, copy);
      }
      if (!is_second && tile >= 2) multiply_values(shared, tile - 2, warp, lane, o);
    }
  } else {
    for (int tile = 0; tile < tiles; ++tile) {
      const ThreadPlace at = thread_anew<P>(thread);
      const int warp = at.warp, lane = at.lane;
      cp_async_wait<0>();  // the thread's copies are there
      __syncthreads();     // the tile is there, and the one before is done with
      give(tile, warp, lane, advance(tile, warp, lane));
      __syncthreads();  // the logits are there
      const bool raised = weigh(shared, tile, scale, warp, lane);
      if (__syncthreads_or(raised)) rescale(shared, tile, lane, o);
      multiply_values(shared, tile, warp, lane, o);
    }
    cp_async_wait<0>();  // the zeros behind the last tile
  }
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
                                             int warp, int lane, const Output<P>& o) {
  // A quad holds 32 columns of a row as 4 blocks of 8, two columns a lane; transposed, each lane
  // has one block, 16 bytes.
  char* const to = heads + (warp * P::kWarpColumns + 8 * (lane & 3)) * 2;
#pragma unroll
  for (int m = 0; m < P::kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = 16 * m + lane / 4 + 8 * r;
      const float factor = shared.ends()[head].load();
#pragma unroll
      for (int part = 0; part < P::kWarpColumns / 32; ++part) {
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
