// A matrix product of mma.sync. One block of eight warps on each multiprocessor has a tile of c in
// its registers, a warp 16 kBlocks rows of it and a quarter of the columns:
//
//   of a warp, for 16 columns of a and b      96 x 64    64 x 64
//   mma.m16n8k16                                   48         32
//   bytes of fragments from shared memory        5120       4096
//   of the tile, bytes copied to shared memory  14336      12288
//
// At the rate of mma.sync on Hopper (about 6.4 cycles each on a quarter of the multiprocessor)
// shared memory is busy 70 % of the time with the larger tile, 86 % with the smaller one. The
// larger one takes 192 of 255 registers for sums, which leaves none for the addresses of cp.async.
//
// Rows of 64 columns of a and b stand in a ring of stages. Fragments are loaded while the products
// before them run: those of a 16 rows ahead, those of b 16 columns of K ahead. Blocks are
// persistent, so that the copies for the next tile run while one is stored, and the tiles of an
// incomplete last round are cut along K (tail_range()), so that no multiprocessor is idle there.
#pragma once

#include <cstdint>

#include "tools/winnow/mma_product_launch.h"
#include <cuda_runtime.h>

#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm80/tile.cuh"
#include "winnow/device/sm90/pipeline.cuh"

namespace winnow::cli::mma_product {

using namespace winnow::device;

inline constexpr Runtime kRuntime{"bench", "mma.sync product"};

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kWarpRows = 2, kWarpColumns = 4;  // warps of a block, as they share its tile
inline constexpr int kDepth = 64;                      // columns of a and b of a stage
inline constexpr int kSlices = kDepth / 16;

// What a block works on: kBlocks of 16 rows of each warp, kColumns of all.
template <int kBlocks_, int kColumns_, int kStages_>
struct Shape {
  static constexpr int kBlocks = kBlocks_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kRows = kWarpRows * 16 * kBlocks;
  static constexpr int kOfWarp = kColumns / kWarpColumns;  // columns
  static constexpr int kSquares = kOfWarp / 16;
  // Fragments of b, one square beside each block of rows.
  static_assert(kSquares <= kBlocks && kOfWarp % 32 == 0);
};

template <class S>
struct Memory {
  alignas(1024) Tile<S::kRows, kDepth> a[S::kStages];
  alignas(1024) Tile<S::kColumns, kDepth> b[S::kStages];
  uint4 upcoming;
  std::uint64_t full[S::kStages], empty[S::kStages];
};

template <class S>
struct Block : Shared<Memory<S>> {
  using Memory = mma_product::Memory<S>;
  WINNOW_PLACE(a)
  WINNOW_PLACE(b)
  WINNOW_PLACE(upcoming)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
};

// ---- The steps of a block: it multiplies kDepth columns of a and b in each ----

// Consecutive steps of one tile.
struct Piece {
  int tile;
  int depth, steps;  // from which columns on, in kDepth; how many steps
};

class Work {
 public:
  __device__ Work(int tiles, int depth) : depth_(depth) {
    const TailRange tail = tail_range(static_cast<unsigned>(tiles), depth, blockIdx.x, gridDim.x);
    own_ = static_cast<int>(tail.first / gridDim.x) * depth;
    first_shared_ = static_cast<int>(tail.first);
    tail_begin_ = static_cast<int>(tail.begin);
    steps_ = own_ + static_cast<int>(tail.end - tail.begin);
  }
  __device__ int steps() const { return steps_; }
  __device__ int depth() const { return depth_; }  // steps of a tile
  // Tiles from this one on may be shared by several blocks.
  __device__ int first_shared() const { return first_shared_; }
  // The piece that begins with this step, the first one of a piece.
  __device__ Piece piece(int step) const {
    if (step < own_) {
      return {static_cast<int>(blockIdx.x + step / depth_ * gridDim.x), 0, depth_};
    }
    const int of_tail = tail_begin_ + step - own_, depth = of_tail % depth_;
    return {first_shared_ + of_tail / depth_, depth, min(depth_ - depth, steps_ - step)};
  }

 private:
  int depth_, own_, first_shared_, tail_begin_, steps_;
};

template <class S>
__host__ __device__ int tile_rows(int m) {
  return (m + S::kRows - 1) / S::kRows;
}

// The first row and column of a tile. Tiles of kGroup rows of tiles follow each other, column by
// column: what runs at a time shares rows of a and b in L2.
template <class S>
__device__ int2 corner(const Product& product, int tile) {
  constexpr int kGroup = 16;
  const int columns = product.n / S::kColumns;
  const int group = tile / (kGroup * columns), in_group = tile % (kGroup * columns);
  const int rows = min(kGroup, tile_rows<S>(product.m) - group * kGroup);
  return {(group * kGroup + in_group % rows) * S::kRows, in_group / rows * S::kColumns};
}

// What is copied next. Divisions take hundreds of cycles: one a piece, not one a step.
struct Upcoming {
  int row, column, depth, left;  // left: steps of the piece
};

template <class S>
__device__ __forceinline__ Upcoming upcoming(const Product& product, const Work& work, int step) {
  const Piece piece = work.piece(step);
  const int2 first = corner<S>(product, piece.tile);
  return {first.x, first.y, piece.depth, piece.steps};
}

// ---- Products ----

template <class S>
using Sums = float[S::kBlocks][2 * S::kSquares][4];

// What a lane passes to ldmatrix of a stage, for its warp's rows.
template <class S>
struct Operands {
  Squares<Tile<S::kRows, kDepth>::kChunkBytes> a;
  Squares<Tile<S::kColumns, kDepth>::kChunkBytes> b;

  __device__ Operands(Block<S> shared, int slot, int warp, int lane)
      : a(shared.a()[slot].squares(lane)),
        // The other order of the four matrices gives a product its b in neighbouring registers.
        b{shared.b()[slot].unit(lane / 16 * 8 + lane % 8, lane / 8 % 2)} {
    a.lane += warp / kWarpColumns * S::kBlocks * kSquareRows * kTileLine;
    b.lane += warp % kWarpColumns * S::kOfWarp * kTileLine;
  }
};

template <class S>
struct Fragments {
  std::uint32_t a[2][4], b[2][S::kSquares][4];

  __device__ __forceinline__ void load_a(const Operands<S>& from, int slice, int block, int to) {
    ldmatrix_x4(from.a.at(block, slice), a[to][0], a[to][1], a[to][2], a[to][3]);
  }
  __device__ __forceinline__ void load_b(const Operands<S>& from, int slice, int square, int to) {
    ldmatrix_x4(from.b.at(square, slice), b[to][square][0], b[to][square][1], b[to][square][2],
                b[to][square][3]);
  }
};

// One step. `next()` gives the operands of the next one, for the fragments that it begins with.
template <class S, class Refill, class Next>
__device__ __forceinline__ void multiply(Operands<S>& from, Fragments<S>& fragments, Sums<S>& sums,
                                         const Refill& refill, const Next& next) {
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    if (slice == kSlices / 2) refill();
    Operands<S> behind = slice == kSlices - 1 ? next() : from;
    const int slice_behind = (slice + 1) % kSlices;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      const int now = (slice * S::kBlocks + block) % 2;
      if (block + 1 < S::kBlocks) {
        fragments.load_a(from, slice, block + 1, 1 - now);
      } else {
        fragments.load_a(behind, slice_behind, 0, 1 - now);
      }
      if (block < S::kSquares) {
        fragments.load_b(behind, slice_behind, block, slice_behind % 2);
      }
#pragma unroll
      for (int square = 0; square < S::kSquares; ++square) {
        const auto& b = fragments.b[slice % 2][square];
        mma_m16n8k16<DType::bf16>(sums[block][2 * square], fragments.a[now], b[0], b[1]);
        mma_m16n8k16<DType::bf16>(sums[block][2 * square + 1], fragments.a[now], b[2], b[3]);
      }
    }
    if (slice == kSlices - 1) from = behind;
  }
}

// ---- Tiles that several blocks have steps of ----

template <class S>
inline constexpr int kSumsOfThread = S::kBlocks * 2 * S::kSquares;  // float4

// Adds the block's sums to those of others, of `all` steps together. The block that comes last gets
// the sum of all; returns whether this is the one.
template <class S, bool kAddsVectors>
__device__ __forceinline__ bool share(const Product& product, int shared_tile, int steps, int all,
                                      Sums<S>& sums) {
  float4* const mine = reinterpret_cast<float4*>(product.partial) +
                       static_cast<std::int64_t>(shared_tile) * kSumsOfThread<S> * kThreads +
                       threadIdx.x;
  const auto place = [&](int block, int n) {
    return mine + (block * 2 * S::kSquares + n) * kThreads;
  };
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int n = 0; n < 2 * S::kSquares; ++n) {
      const auto& d = sums[block][n];
      float* const to = reinterpret_cast<float*>(place(block, n));
      if constexpr (kAddsVectors) {
        reduce_add(to, make_float4(d[0], d[1], d[2], d[3]));
      } else {
        for (int i = 0; i < 4; ++i) reduce_add(to + i, d[i]);
      }
    }
  }
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    unsigned* const count = product.steps_of_shared + shared_tile;
    __threadfence();
    last = atomicAdd(count, static_cast<unsigned>(steps)) + static_cast<unsigned>(steps) ==
           static_cast<unsigned>(all);
    __threadfence();
    if (last) *count = 0;
  }
  if (!__syncthreads_or(last)) return false;
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int n = 0; n < 2 * S::kSquares; ++n) {
      const float4 sum = __ldcg(place(block, n));
      *place(block, n) = make_float4(0, 0, 0, 0);
      auto& d = sums[block][n];
      d[0] = sum.x, d[1] = sum.y, d[2] = sum.z, d[3] = sum.w;
    }
  }
  return true;
}

template <class S>
__device__ __forceinline__ void store(const Product& product, int tile, int warp, int lane,
                                      const Sums<S>& sums) {
  const int2 first = corner<S>(product, tile);
  const int row0 = first.x + warp / kWarpColumns * S::kBlocks * 16 + lane / 4;
  const std::int64_t stride = std::int64_t{2} * product.n;
  char* const to =
      product.c + row0 * stride + (first.y + warp % kWarpColumns * S::kOfWarp + lane % 4 * 8) * 2;
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * block + 8 * half;
#pragma unroll
      for (int part = 0; part < S::kOfWarp / 32; ++part) {
        // A quad has four blocks of 8 columns of a row, two columns each; transposed, each lane has
        // one block, 16 bytes.
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& d = sums[block][4 * part + i];
          words[i] = pack_bf16(d[2 * half], d[2 * half + 1]);
        }
        quad_transpose(words, lane);
        if (row0 + row < product.m) {
          store_streaming(to + row * stride + 64 * part, words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

template <class Copies>
using SourceOf = typename Copies::Source;

// Copies<S> fills the stages, from what its struct Source says. await() comes back when the stage
// of a step is there; refill() and release() come in the middle and at the end of each step.
template <class S, template <class> class Copies>
__global__ __launch_bounds__(kThreads, 1) void product_kernel(
    const Product product, const __grid_constant__ SourceOf<Copies<S>> source) {
  const Block<S> shared{shared_address(dynamic_shared<1024>())};
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Work work(tile_rows<S>(product.m) * (product.n / S::kColumns), product.k / kDepth);
  Copies<S> copies(shared, product, source, work);
  for (int step = 0; step < work.steps();) {
    const Piece piece = work.piece(step);
    const int end = step + piece.steps;
    Sums<S> sums = {};
    Fragments<S> fragments;
    copies.await(step);
    Operands<S> operands(shared, copies.slot(step), warp, lane);
    fragments.load_a(operands, 0, 0, 0);
#pragma unroll
    for (int square = 0; square < S::kSquares; ++square) fragments.load_b(operands, 0, square, 0);
#pragma unroll 1
    for (; step < end; ++step) {
      multiply<S>(
          operands, fragments, sums, [&] { copies.refill(step); },
          [&] {
            const bool more = step + 1 < end;
            if (more) copies.await(step + 1);
            // The last step loads fragments to no purpose.
            return Operands<S>(shared, copies.slot(more ? step + 1 : step), warp, lane);
          });
      copies.release(step);
    }
    if (piece.steps == work.depth() ||
        share<S, Copies<S>::kAddsVectors>(product, piece.tile - work.first_shared(), piece.steps,
                                          work.depth(), sums)) {
      store<S>(product, piece.tile, warp, lane, sums);
    }
  }
}

// ---- Launches ----

template <class S>
inline constexpr int kBytes = static_cast<int>(sizeof(Memory<S>));

template <class S, template <class> class Copies>
void load_product() {
  kRuntime.allow_shared_memory(product_kernel<S, Copies>, kBytes<S>);
}

template <class S, template <class> class Copies>
void launch_product(const Product& product, const SourceOf<Copies<S>>& source, int blocks,
                    void* stream) {
  kRuntime.launch(product_kernel<S, Copies>, static_cast<unsigned>(blocks), kThreads, kBytes<S>,
                  static_cast<cudaStream_t>(stream), product, source);
}

}  // namespace winnow::cli::mma_product
